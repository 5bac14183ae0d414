// Small drawings: elements, numbers in words, curves, trees and maps. No library.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  fill(made, attributes, children);
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  fill(made, attributes, children);
  return made;
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
}

// ---- numbers in words

const missing = (value) => value === null || value === undefined || !Number.isFinite(value);

export function number(value, digits = 4) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 1e-12) return "below 0.000000000001";
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 14 });
}

export function bytes(value) {
  if (missing(value)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function duration(seconds) {
  if (missing(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

// ---- one colour and one dash per run

export const strokeOf = (n) => `s${n % 7}`;
export const dashOf = (n) => DASHES[Math.floor(n / 7) % DASHES.length];

export function swatch(n) {
  return svg("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" },
    svg("line", { x1: 0, y1: 5, x2: 26, y2: 5, class: strokeOf(n), "stroke-width": 3,
      "stroke-dasharray": dashOf(n) || null }));
}

// ---- curves

const W = 560, H = 280, LEFT = 58, RIGHT = 14, TOP = 12, BOTTOM = 42;

function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(t);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    for (const m of [1, 2, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

// series: [{name, number, points: [[x, y], ...]}]; marks: [[label, y]]
export function chart({ series, marks = [], x, y, log = false }) {
  const drawn = series.map((s) => ({ ...s, points: s.points.filter(([a, b]) =>
    !missing(a) && !missing(b) && (!log || b > 0)) })).filter((s) => s.points.length);
  if (!drawn.length) return el("p", { class: "quiet" }, "Nothing is known yet.");
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const s of drawn) for (const [a, b] of s.points) {
    x0 = Math.min(x0, a); x1 = Math.max(x1, a); y0 = Math.min(y0, b); y1 = Math.max(y1, b);
  }
  for (const [, b] of marks) { y0 = Math.min(y0, b); y1 = Math.max(y1, b); }
  if (x0 === x1) { x0 -= .5; x1 += .5; }
  const room = log ? (y1 / y0) ** .05 || 1.05 : (y1 - y0) * .05 || Math.abs(y1) * .05 || 1;
  [y0, y1] = log ? [y0 / Math.max(room, 1.02), y1 * Math.max(room, 1.02)] : [y0 - room, y1 + room];
  const at = (a) => LEFT + (a - x0) / (x1 - x0) * (W - LEFT - RIGHT);
  const scale = log ? Math.log : (v) => v;
  const up = (b) => H - BOTTOM - (scale(b) - scale(y0)) / (scale(y1) - scale(y0)) * (H - TOP - BOTTOM);

  const label = `${y} over ${x}: ` + drawn.map((s) =>
    `${s.name} ends at ${number(s.points.at(-1)[1])}`).join("; ");
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  for (const t of ticks(x0, x1, 7)) {
    picture.append(svg("line", { class: "axis", x1: at(t), x2: at(t), y1: TOP, y2: H - BOTTOM }),
      svg("text", { x: at(t), y: H - BOTTOM + 16, "text-anchor": "middle" }, number(t)));
  }
  for (const t of log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: up(t), y2: up(t) }),
      svg("text", { x: LEFT - 6, y: up(t) + 4, "text-anchor": "end" }, number(t)));
  }
  picture.append(svg("text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, x),
    svg("text", { x: 12, y: (H - BOTTOM) / 2, transform: `rotate(-90 12 ${(H - BOTTOM) / 2})`,
      "text-anchor": "middle" }, y));
  for (const [name, b] of marks) {
    picture.append(svg("line", { class: "mark", x1: LEFT, x2: W - RIGHT, y1: up(b), y2: up(b) }),
      svg("text", { x: W - RIGHT, y: up(b) - 4, "text-anchor": "end" }, name));
  }
  for (const s of drawn) {
    const d = s.points.map(([a, b], n) => `${n ? "L" : "M"}${at(a).toFixed(1)} ${up(b).toFixed(1)}`);
    picture.append(svg("path", { class: `curve ${strokeOf(s.number)}`, d: d.join(""),
      "stroke-dasharray": dashOf(s.number) || null }));
    if (s.points.length < 3) for (const [a, b] of s.points) picture.append(
      svg("circle", { class: strokeOf(s.number), cx: at(a), cy: up(b), r: 3, fill: "none" }));
  }
  // The values under the pointer, in words below the picture.
  const said = el("p", { class: "said" });
  const cross = svg("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  picture.append(cross);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = x0 + ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
    const near = drawn.map((s) => [s, s.points.reduce((p, q) =>
      Math.abs(q[0] - wanted) < Math.abs(p[0] - wanted) ? q : p)]);
    const here = near[0][1][0];
    cross.setAttribute("x1", at(here)); cross.setAttribute("x2", at(here));
    cross.setAttribute("visibility", "visible");
    said.textContent = `${x} ${number(here)}: ` +
      near.map(([s, p]) => `${drawn.length > 1 ? s.name + " " : ""}${number(p[1])}`).join(", ");
  });
  picture.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden"); said.textContent = "";
  });
  const legend = drawn.length < 2 ? null : el("ul", { class: "legend" }, drawn.map((s) =>
    el("li", {}, swatch(s.number), s.name)));
  return el("figure", {}, picture, said, legend);
}

// ---- a tree whose picture moves with the rounds

export function treePicture(tree, frame) {
  const { names, parents } = tree;
  const children = names.map((_, n) => parents.flatMap((p, c) => (p === n ? [c] : [])));
  const place = [];
  let column = 0, deepest = 0;
  const put = (n, depth) => {
    deepest = Math.max(deepest, depth);
    for (const c of children[n]) put(c, depth + 1);
    const below = children[n].map((c) => place[c][0]);
    place[n] = [below.length ? (below[0] + below.at(-1)) / 2 : column++, depth];
  };
  put(0, 0);
  const leaves = Math.max(1, column), flat = leaves > 12;
  // Many leaves stand below each other, few beside each other.
  const step = flat ? 26 : 700 / leaves, height = flat ? leaves * step + 30 : deepest * 110 + 110;
  const at = (n) => {
    const [a, b] = place[n];
    return flat ? [40 + b * (440 / Math.max(1, deepest)), 22 + a * step]
                : [30 + (a + .5) * step, 36 + b * 110];
  };
  const of = (n) => frame.nodes[names[n]] || {};
  const score = (n) => {
    const here = frame.places[names[n]];
    if (here) return here[0];
    return frame.last && tree.final[names[n]] ? tree.final[names[n]][0] : null;
  };
  const said = names.map((name, n) => {
    const parts = [name];
    if (!missing(score(n))) parts.push(`perplexity ${number(score(n))}`);
    if (!missing(of(n).self_weight)) parts.push(`weight of itself ${number(of(n).self_weight, 3)}`);
    if (of(n).missed) parts.push("missed this round");
    return parts.join(", ");
  });
  const picture = svg("svg", { class: "map", viewBox: `0 0 760 ${height}`, role: "img",
    "aria-label": `The tree after round ${frame.round}: ${said.join("; ")}` },
    svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4,
      markerWidth: 6, markerHeight: 6, orient: "auto" }, svg("path", { class: "tip", d: "M0 0L8 4L0 8z" }))));
  const branch = (n, off) => {
    const [a, b] = at(n), [c, d] = at(parents[n]);
    return flat ? `M${c} ${d + off}C${(a + c) / 2} ${d + off} ${(a + c) / 2} ${b + off} ${a} ${b + off}`
      : `M${c + off} ${d}C${c + off} ${(b + d) / 2} ${a + off} ${(b + d) / 2} ${a + off} ${b}`;
  };
  const between = new Map(); // attention along a branch: of the child to its parent, and back
  for (const [who, whom, weight, way] of frame.listens || []) {
    const child = way === "down" ? names.indexOf(who) : names.indexOf(whom);
    const parent = way === "down" ? whom : who;
    if (child > 0 && names[parents[child]] === parent) between.set(`${child} ${way}`, weight);
  }
  names.forEach((name, n) => {
    if (n === 0) return;
    const moved = (frame.bytes || {})[name], down = between.get(`${n} down`), up = between.get(`${n} up`);
    const words = [moved && (moved[0] || moved[1]) ? `${name}: sent ${bytes(moved[0])} up, received ${bytes(moved[1])}` : name];
    if (down) words.push(`listens to ${names[parents[n]]} with weight ${number(down, 2)}`);
    if (up) words.push(`${names[parents[n]]} listens to it with weight ${number(up, 2)}`);
    const group = svg("g", {}, svg("title", {}, words.join("; ")),
      svg("path", { class: "edge", d: branch(n, 0), "stroke-dasharray": of(n).missed ? "3 4" : null }));
    if (down) group.append(svg("path", { class: "hears", d: branch(n, -3.5), "stroke-width": (9 * down).toFixed(2) }));
    if (up) group.append(svg("path", { class: "heard", d: branch(n, 3.5), "stroke-width": (9 * up).toFixed(2) }));
    picture.append(group);
  });
  for (const [from, to, layers] of frame.routes) {
    const s = names.indexOf(from), t = names.indexOf(to);
    if (s < 0 || t < 0 || s === t) continue;
    const [a, b] = at(s), [c, d] = at(t);
    const bow = flat ? 20 + Math.min(180, Math.abs(b - d) / 4) : 30 + Math.min(60, Math.abs(a - c) / 8);
    picture.append(svg("path", { class: "route", "stroke-width": Math.min(4, 1 + layers / 3),
      "marker-end": "url(#arrow)", d: flat ? `M${a - 10} ${b}Q${Math.min(a, c) - bow} ${(b + d) / 2} ${c - 11} ${d}`
        : `M${a} ${b - 10}Q${(a + c) / 2} ${Math.min(b, d) - bow} ${c} ${d - 11}` }));
  }
  names.forEach((name, n) => {
    const [a, b] = at(n), r = 9, own = of(n).self_weight;
    const group = svg("g", {}, svg("title", {}, said[n]),
      svg("circle", { class: of(n).missed ? "knot missed" : "knot", cx: a, cy: b, r }));
    if (!missing(own)) { // the part of the ring that is blue: how much the node listens to itself
      const round = 2 * Math.PI * r;
      group.append(svg("circle", { class: "ring", cx: a, cy: b, r,
        "stroke-dasharray": `${own * round} ${round}`, transform: `rotate(-90 ${a} ${b})` }));
    }
    const figure = missing(score(n)) ? "" : number(score(n), 3);
    if (flat) group.append(svg("text", children[n].length
      ? { x: a, y: b - 15, "text-anchor": n ? "middle" : "start" } : { x: a + 15, y: b + 4 },
      svg("tspan", { class: "name" }, name), figure ? `  ${figure}` : ""));
    else if (children[n].length) group.append( // beside the branches below it
      svg("text", { class: "halo", x: a + 16, y: b + 4 }, svg("tspan", { class: "name" }, name), figure ? `  ${figure}` : ""));
    else group.append(svg("text", { class: "name", x: a, y: b + 26, "text-anchor": "middle" }, name),
      svg("text", { x: a, y: b + 41, "text-anchor": "middle" }, figure));
    picture.append(group);
  });
  return picture;
}

// ---- the map of a federation: who is there, who was late, what travelled on which edge

const DASH_OF = { answered: null, late: "8 4", away: "1 6", refused: "12 3 2 3", garbage: "12 3 2 3", aside: "4 8" };
const SAID = { garbage: "sent garbage", aside: "put aside", undefined: "not asked" };
const traffic = (moved) => moved ? `↑ ${bytes(moved[0])}  ↓ ${bytes(moved[1])}` : "";

export function federationMap(federation) {
  const { seats, last, counts, edges = {} } = federation, STEP = 44, SERVER = 66, SEAT = 300, LEAF = 560;
  const outcome = (name) => (last.of || {})[name], said = (name) => SAID[outcome(name)] || outcome(name);
  let rows = 0;
  const places = seats.map((seat) => { // a row per node, and one per node below a relay
    const first = rows;
    rows += Math.max(1, seat.below.length);
    return 26 + STEP * (first + (Math.max(1, seat.below.length) - 1) / 2);
  });
  const height = Math.max(90, STEP * rows + 20), middle = height / 2;
  const most = Math.max(1, ...Object.values(edges).map(([a, b]) => a + b));
  const told = (seat) => [seat.name, seat.below.length ? `a relay of ${seat.below.length}` : "", said(seat.name), traffic(edges[seat.name])]
    .filter(Boolean).join(", ");
  const picture = svg("svg", { class: "map", viewBox: `0 0 760 ${height}`, role: "img",
    "aria-label": `The federation in round ${last.round || 0}: ${seats.map((seat) => `${seat.name} ${said(seat.name)}`).join("; ")}` });
  const bent = (a, b, c, d) => `M${a} ${b}C${(a + c) / 2} ${b} ${(a + c) / 2} ${d} ${c} ${d}`;
  let row = 0;
  const knots = [];
  seats.forEach((seat, n) => {
    const y = places[n], what = outcome(seat.name), moved = edges[seat.name];
    const thick = moved ? 1.5 + 5 * Math.sqrt((moved[0] + moved[1]) / most) : 1.5;
    picture.append(svg("path", { class: `edge o-${what || "none"}`, "stroke-width": thick.toFixed(1),
      d: bent(SERVER + 34, middle, SEAT, y), "stroke-dasharray": DASH_OF[what] || null }));
    seat.below.forEach((leaf, m) => {
      const at = 26 + STEP * (row + m);
      picture.append(svg("path", { class: "edge", d: bent(SEAT + 9, y, LEAF, at) }));
      knots.push(svg("g", {}, svg("title", {}, `${leaf}, below the relay ${seat.name}`), svg("circle", { class: "knot", cx: LEAF, cy: at, r: 8 }),
        svg("text", { class: "name", x: LEAF + 15, y: at + 4 }, leaf)));
    });
    row += Math.max(1, seat.below.length);
    const all = Object.entries(counts[seat.name] || {}).map(([k, v]) => `${v} ${k}`).join(", ");
    const text = { x: SEAT - 9, "text-anchor": "start" }, side = { x: SEAT + 16, "text-anchor": "start" };
    const where = seat.below.length ? text : side, low = seat.below.length ? [y - 16, y + 24] : [y - 2, y + 13];
    knots.push(svg("g", {}, svg("title", {}, `${told(seat)}${all ? `; in all rounds: ${all}` : ""}`),
      seat.below.length ? svg("rect", { class: "knot", x: SEAT - 9, y: y - 9, width: 18, height: 18, rx: 3 })
        : svg("circle", { class: "knot", cx: SEAT, cy: y, r: 9 }),
      svg("text", { ...where, class: "name halo", y: low[0] }, seat.name),
      svg("text", { ...where, class: "halo", y: low[1] }, [said(seat.name), traffic(moved)].filter(Boolean).join(" · "))));
  });
  picture.append(...knots, svg("rect", { class: "knot", x: SERVER - 34, y: middle - 15, width: 68, height: 30, rx: 6 }),
    svg("text", { class: "name", x: SERVER, y: middle + 4, "text-anchor": "middle" }, "server"));
  return picture;
}
