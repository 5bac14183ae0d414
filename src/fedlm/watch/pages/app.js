// The page: what the server streams, and the views that show it.

import { bytes, chart, duration, el, federationMap, number, swatch, treePicture } from "./draw.js";
import { keyboardView } from "./keyboard.js";

const rows = new Map(); // every run's row, by id
const details = new Map(); // runs that are looked at
let sweeps = [], folder = "", stream = null, lookedAt = "", view = null, queued = false;
const chosen = new Set(); // for a comparison
const shortNames = new Map();
const main = document.getElementById("main"), connection = document.getElementById("connection");

if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token

// ---- the stream

function connect(ids) {
  const wanted = ids.map((id) => `run=${encodeURIComponent(id)}`).join("&");
  if (stream && wanted === lookedAt) return;
  if (stream) stream.close();
  lookedAt = wanted;
  stream = new EventSource(`/events?${wanted}`);
  let first = true;
  stream.addEventListener("board", (event) => {
    const news = JSON.parse(event.data);
    if (first) { rows.clear(); first = false; }
    for (const row of news.rows) rows.set(row.id, row);
    for (const id of news.gone) rows.delete(id);
    if (news.sweeps) { sweeps = news.sweeps; nameRuns(); }
    if (news.folder) folder = news.folder;
    connection.textContent = "live";
    refresh();
  });
  stream.addEventListener("run", (event) => {
    const found = JSON.parse(event.data);
    details.set(found.id, found);
    refresh();
  });
  const mine = stream;
  stream.onerror = () => { // a browser tries again by itself, unless it was refused
    connection.textContent = mine.readyState === EventSource.CLOSED
      ? "This page is of an earlier start of fedlm watch: open the address that it printed now."
      : "The server does not answer; trying again.";
  };
}

// Points of a sweep share most of their names: what all of them have is left out.
function nameRuns() {
  shortNames.clear();
  for (const sweep of sweeps) {
    const ids = [...new Set([...sweep.runs, ...sweep.planned.map((p) => `${sweep.name}/${p.name}`)])];
    const parts = ids.map((id) => id.slice(sweep.name.length + 1).split(","));
    const short = parts.map((of) => of.filter((part) => !parts.every((other) => other.includes(part))).join(","));
    if (ids.length > 1 && short.every(Boolean) && new Set(short).size === ids.length) ids.forEach((id, n) => shortNames.set(id, short[n]));
  }
}

const nameOf = (id) => shortNames.get(id) || id.split("/").at(-1);
const labelOf = (id) => shortNames.has(id) ? `${id.split("/").slice(0, -1).join("/")}: ${shortNames.get(id)}` : id;

function refresh() { // at most once per frame
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; if (view) view.update(); });
}

async function ask(path, body) {
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" } });
  const found = await answer.json().catch(() => ({ error: "The server did not answer." }));
  if (found.error) throw new Error(found.error);
  return found.done;
}

// ---- parts that several views share

const WORDS = { killed: "bad", failed: "bad", finished: "done", planned: "planned" };
const stateClass = (row) => `state ${row.live ? "live" : WORDS[row.state] || ""}`;
const link = (id) => `#/run/${encodeURIComponent(id)}`;
const roundsOf = (row) => row.rounds ? `${row.round || 0} of ${row.rounds}` : `${row.round || 0}`;
const spent = (row) => row.epsilon === null || row.epsilon === undefined
  ? (row.private ? "–" : "none promised")
  : number(row.epsilon, 3) + (row.budget ? ` of ${number(row.budget, 3)}` : "");
const bar = (row) => row.live && row.rounds
  ? el("progress", { max: row.rounds, value: row.round || 0, "aria-label": `rounds of ${row.name}` }) : null;
// A table that may be wider than the screen: it is scrolled by itself, with keys too.
const wide = (table) => el("div", { class: "wide", role: "group", tabindex: "0", "aria-label": "a table that can be scrolled" }, table);
const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

// Replace a node's content, but keep the focus if the same control is there again.
function show(node, ...content) {
  const held = document.activeElement && node.contains(document.activeElement)
    ? document.activeElement.dataset.key : null;
  node.replaceChildren(...content.filter(Boolean));
  if (held) node.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus();
}

// ---- all runs

const COLUMNS = [
  ["loss", (r) => number(r.loss)], ["perplexity", (r) => number(r.perplexity)],
  ["clients/s", (r) => number(r.clients_per_second, 3)], ["sent up", (r) => bytes(r.upload_bytes)],
  ["epsilon", (r) => r.private ? spent(r) : "–"], ["time left", (r) => duration(r.left)],
];

const drawnRows = new Map(); // a row that did not change is the same element again

function runRow(row, extra = null) {
  const sign = JSON.stringify([row, extra, chosen.has(row.id), nameOf(row.id)]), old = drawnRows.get(row.id);
  if (old && old.sign === sign) return old.made;
  const made = drawRow(row, extra);
  drawnRows.set(row.id, { sign, made });
  return made;
}

function drawRow(row, extra) {
  return el("tr", {},
    el("td", {}, el("input", { type: "checkbox", "aria-label": `Compare ${row.id}`, "data-key": `c-${row.id}`,
      checked: chosen.has(row.id), onchange: (event) => {
        chosen[event.target.checked ? "add" : "delete"](row.id); refresh(); } })),
    el("th", { scope: "row" }, swatch(row.number), el("a", { href: link(row.id), title: row.id, "data-key": `r-${row.id}` }, row.id === "." ? row.name : nameOf(row.id)),
      row.group && !extra ? el("span", { class: "doing" }, row.group) : null),
    el("td", {}, el("span", { class: stateClass(row) }, row.state),
      row.doing && row.live ? el("span", { class: "doing" }, row.doing) : null,
      row.problem ? el("span", { class: "doing problem" }, row.problem) : null, bar(row)),
    el("td", { class: "n", "data-head": "round" }, roundsOf(row)),
    COLUMNS.map(([head, of]) => { const text = of(row);
      return el("td", { class: text === "–" ? "n empty" : "n", "data-head": head }, text); }),
    (extra || []).map(([name, value]) => el("td", { class: "n", "data-head": name }, value)));
}

function head(extra = []) {
  return el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "compare"), el("th", { scope: "col" }, "run"),
    el("th", { scope: "col" }, "state"), el("th", { scope: "col", class: "n" }, "round"),
    [...COLUMNS.map(([name]) => name), ...extra].map((name) => el("th", { scope: "col", class: "n" }, name))));
}

function homeView() {
  let wanted = "";
  const list = el("div"), buttons = el("div", { class: "bar" });
  const search = el("input", { type: "search", id: "search", "data-key": "search",
    oninput: (event) => { wanted = event.target.value.toLowerCase(); update(); } });
  const where = el("p", { class: "quiet" });
  main.replaceChildren(el("h1", {}, "Runs"), where,
    el("div", { class: "bar" }, el("label", { for: "search" }, "Show runs whose name has"), search), buttons, list);
  function update() {
    document.title = "fedlm watch";
    const all = [...rows.values()], live = all.filter((r) => r.live).length;
    where.textContent = `${folder}: ${all.length} runs, ${live} at work.`;
    show(buttons, el("button", { type: "button", "data-key": "compare", disabled: chosen.size < 2,
      onclick: () => { location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join("/")}`; } },
      chosen.size < 2 ? "Choose runs to compare" : `Compare ${chosen.size} runs`));
    const fits = (row) => !wanted || row.id.toLowerCase().includes(wanted);
    const grouped = new Set(sweeps.flatMap((s) => s.runs));
    const plain = all.filter((row) => !grouped.has(row.id) && fits(row))
      .sort((a, b) => b.live - a.live || a.id.localeCompare(b.id));
    const parts = [];
    if (plain.length) parts.push(wide(el("table", { class: "runs" },
      el("caption", {}, "The figures of each run; perplexity is of text held out from training."),
      head(), el("tbody", {}, plain.map((row) => runRow(row))))));
    for (const sweep of sweeps) parts.push(...sweepTable(sweep, fits));
    if (!all.length) parts.push(el("p", {}, "No run is here yet: ", el("code", {}, "fedlm train sotu"), " makes one."));
    show(list, ...parts);
  }
  return { update, runs: [] };
}

// A folder of runs: one row per point, also for points that have not begun.
function sweepTable(sweep, fits) {
  const there = sweep.runs.map((id) => rows.get(id)).filter((row) => row && fits(row));
  const begun = new Set(sweep.runs);
  const waiting = sweep.planned.filter((p) => !begun.has(`${sweep.name}/${p.name}`));
  if (!there.length && !waiting.length) return [];
  const bare = (name) => name.replace(/^[a-z]+\./, "");
  const names = sweep.head.map((name) => sweep.head.filter((other) => bare(other) === bare(name)).length > 1 ? name : bare(name));
  const values = (id) => (sweep.values[id] || []).map((value, n) => [names[n], value === null ? "–" : String(value)]);
  const done = there.filter((row) => row.state === "finished").length;
  return [el("h2", {}, sweep.name), wide(el("table", { class: "runs" },
    el("caption", {}, `${done} of ${there.length + waiting.length} points are finished; the last columns are settings in which they differ.`),
    head(names), el("tbody", {}, there.map((row) => runRow(row, values(row.id))),
      waiting.map((point) => el("tr", {}, el("td"), el("th", { scope: "row" }, nameOf(`${sweep.name}/${point.name}`)),
        el("td", {}, el("span", { class: "state planned" }, "not begun")),
        el("td", { class: "n empty", colspan: 1 + COLUMNS.length }),
        values(`${sweep.name}/${point.name}`).map(([name, value]) => el("td", { class: "n", "data-head": name }, value)))))))];
}

// ---- one run

const AXES = { rounds: ["round", (p) => p.round], bytes: ["megabytes sent up", (p) => p.upload_bytes / 1e6],
  seconds: ["seconds of training", (p) => p.seconds], epsilon: ["epsilon", (p) => p.epsilon] };

function points(found) {
  return (found.points || []).map((values) => Object.fromEntries(found.columns.map((name, n) => [name, values[n]])));
}

function curve(found, row, axis, what) {
  const of = AXES[axis][1];
  const pairs = points(found).filter((p) => p[what] !== null).map((p) => [of(p), p[what]]);
  if (axis === "rounds" && what === "perplexity" && found.start_perplexity) pairs.unshift([0, found.start_perplexity]);
  return { name: labelOf(row.id), number: row.number, points: pairs };
}

function axisChoice(axis, set) {
  return el("label", {}, "Over ", el("select", { "data-key": "axis", onchange: (event) => set(event.target.value) },
    Object.keys(AXES).map((name) => el("option", { value: name, selected: name === axis }, name))));
}

function runView(id) {
  let axis = "rounds", at = null, saying = "", playing = null;
  const title = el("h1"), now = el("div", { role: "status" }), buttons = el("div", { class: "bar" });
  const figures = el("dl", { class: "figures" }), charts = el("div"), more = el("div");
  main.replaceChildren(title, now, buttons, figures, charts, more);
  async function act(path) {
    try { saying = await ask(path, { id }); } catch (error) { saying = error.message; }
    refresh();
  }
  function update() {
    const row = rows.get(id), found = details.get(id);
    document.title = `${row ? row.name : id}, fedlm watch`;
    if (!row) {
      show(title, id); show(now, el("p", { class: "problem" }, rows.size ? "This run is not in the folder." : "Reading the run."));
      return;
    }
    title.title = row.id;
    show(title, swatch(row.number), labelOf(row.id));
    const said = [el("p", {}, el("span", { class: stateClass(row) }, row.state), row.doing ? `: ${row.doing}` : "")];
    if (row.live && row.follows) said.push(el("p", { class: "quiet" }, `Then: ${row.follows}`));
    const problem = row.problem || (found && found.problem);
    if (problem) said.push(el("p", { class: "problem" }, problem));
    if (saying) said.push(el("p", {}, saying));
    if (now.textContent !== said.map((p) => p.textContent).join("")) show(now, ...said); // read out once
    show(buttons,
      el("button", { type: "button", "data-key": "stop", disabled: !row.can_stop, onclick: () => act("/stop") }, "Stop after this round"),
      el("button", { type: "button", "data-key": "resume", disabled: !row.can_resume, onclick: () => act("/resume") }, "Resume"),
      found && found.models && found.models.length ? el("a", { href: `#/keyboard/${encodeURIComponent(id)}`, "data-key": "type" }, "Type with it") : null);
    show(figures, fact("round", roundsOf(row), bar(row)), row.private && row.loss === null ? null : fact("loss", number(row.loss)),
      fact(row.held_out ? `perplexity, ${row.held_out}` : "perplexity", number(row.perplexity)),
      fact("clients per second", number(row.clients_per_second, 3)), fact("sent up", bytes(row.upload_bytes)),
      fact("sent down", bytes(row.download_bytes)),
      fact(row.budget ? "epsilon of budget" : "epsilon", spent(row)),
      fact("time left", duration(row.left)), fact("parameters", number(row.parameters)));
    if (!found || !found.points) return;
    const marks = Object.entries(found.baselines.validation || found.baselines.test || {});
    show(charts, el("div", { class: "bar" }, axisChoice(axis, (name) => { axis = name; update(); })), el("div", { class: "pair" },
      el("section", {}, el("h2", {}, "Perplexity"), chart({ series: [curve(found, row, axis, "perplexity")],
        marks: axis === "rounds" ? marks : [], x: AXES[axis][0], y: "perplexity", log: true })),
      el("section", {}, el("h2", {}, "Training loss"), row.private && row.loss === null
        ? el("p", { class: "quiet" }, "It is computed from training text: under its privacy plan the run does not tell it.")
        : chart({ series: [curve(found, row, axis, "loss")], x: AXES[axis][0], y: "nats per token" }))));
    show(more, ...(found.tree ? treePart(found.tree, row) : []), ...(found.federation ? federationPart(found.federation) : []),
      ...privacyPart(found), ...samplesPart(found), settingsPart(found));
  }
  function play() { // from the first round, or on from where it was paused
    if (playing) { clearInterval(playing); playing = null; update(); return; }
    if (at === null) at = 0;
    playing = setInterval(() => {
      const frames = ((details.get(id) || {}).tree || {}).frames || [];
      at = at === null || at + 1 >= frames.length - 1 ? null : at + 1;
      if (at === null || view !== made) { clearInterval(playing); playing = null; }
      if (view === made) update();
    }, 600);
    update();
  }
  function treePart(tree, row) {
    const frames = tree.frames;
    if (!frames.length) return [el("h2", {}, "The tree"), el("p", { class: "quiet" }, "No round has been played yet.")];
    const n = at === null || at >= frames.length ? frames.length - 1 : at;
    const frame = { ...frames[n], last: n === frames.length - 1 && !row.live };
    if (!Object.keys(frame.places).length) { // perplexities come with evaluations: the latest before
      for (let m = n; m >= 0; m--) if (Object.keys(frames[m].places).length) { frame.places = frames[m].places; break; }
    }
    return [el("h2", {}, "The tree"), el("div", { class: "bar" }, el("label", {}, "Round ", el("input", { type: "range",
      "data-key": "frame", min: 0, max: frames.length - 1, value: n, oninput: (event) => {
        at = Number(event.target.value) === frames.length - 1 ? null : Number(event.target.value); update(); } })),
      el("span", {}, `${frame.round}${at === null ? ", the latest" : ""}`),
      el("button", { type: "button", "data-key": "play", disabled: frames.length < 2, onclick: play }, playing ? "Pause" : "Play the rounds")), treePicture(tree, frame),
      el("p", { class: "quiet" }, "The number at a node is its perplexity on its own text; the blue part of its ring is how much it listens to itself. ",
        el("b", { class: "key-hears" }, "Blue lines"), " are how much a node listens to its parent, ", el("b", { class: "key-heard" }, "green lines"), " how much the parent listens to it. ",
        el("b", { class: "key-route" }, "Arrows"), " are residuals: layers that were sent on to the node they resemble most. Point at a line to read its bytes."),
      el("details", {}, el("summary", {}, "The same in numbers"), wide(el("table", {},
        el("thead", {}, el("tr", {}, ["node", "parent", "perplexity", "weight of itself", "spread of attention", "agreement of children", "sent up", "sent down"]
          .map((name, m) => el("th", { scope: "col", class: m > 1 ? "n" : null }, name)))),
        el("tbody", {}, tree.names.map((name, m) => { const of = frame.nodes[name] || {}, moved = tree.moved[name] || [];
          return el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, tree.names[tree.parents[m]] || "–"),
            [number((frame.places[name] || tree.final[name] || [])[0]), number(of.self_weight, 3), number(of.entropy_down, 3),
              number(of.agreement, 3), bytes(moved[0]), bytes(moved[1])].map((text) => el("td", { class: "n" }, text))); })))))];
  }
  const made = { update, runs: [id] };
  return made;
}

function federationPart(federation) {
  const title = el("h2", {}, "The federation");
  if (!federation.named) return [title, el("p", {}, `${federation.nodes} nodes. Which of them were asked and answered is a secret of the run's owner under its privacy plan.`)];
  const { last, counts, edges } = federation;
  const outcomes = ["answered", "late", "away", "refused", "garbage", "aside"];
  return [title, el("p", {}, last.round ? `Round ${last.round}; ${bytes(federation.bytes[0])} received from nodes and ${bytes(federation.bytes[1])} sent to them in all rounds.` : "No round has been played yet."),
    federationMap(federation),
    wide(el("table", {}, el("caption", {}, "In how many rounds each node answered, what travelled, and what it said last. Bytes below a relay are known to the relay."),
      el("thead", {}, el("tr", {}, ["node", ...outcomes, "received from it", "sent to it"].map((name, n) => el("th", { scope: "col", class: n ? "n" : null }, name)), el("th", { scope: "col" }, "last words"))),
      el("tbody", {}, Object.keys(counts).sort().map((name) => el("tr", {}, el("th", { scope: "row" }, name),
        outcomes.map((what) => el("td", { class: "n" }, String(counts[name][what] || 0))),
        [0, 1].map((way) => el("td", { class: "n" }, edges[name] ? bytes(edges[name][way]) : "–")), el("td", {}, (last.said || {})[name] || "–"))))))];
}

function privacyPart(found) {
  if (!found.mechanism) return [];
  return [el("h2", {}, "Privacy"), el("p", {}, found.privacy || `Trained with the mechanism ${found.mechanism}; the claim is made when the run ends.`)];
}

function samplesPart(found) {
  if (!found.predictions.length) return [];
  return [el("h2", {}, "What it would say"), el("ul", {}, found.predictions.map((p) => el("li", {}, el("b", {}, p.prompt), " … ",
    p.next.map((w) => `${w.word} ${Math.round(100 * w.probability)}%`).join(", "))))];
}

function settingsPart(found) {
  return el("details", {}, el("summary", {}, "Settings"), wide(el("table", {},
    el("tbody", {}, Object.entries(found.settings).map(([name, value]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value === null ? "–" : String(value))))))));
}

// ---- several runs side by side

function compareView(ids) {
  let axis = "rounds";
  const body = el("div");
  main.replaceChildren(el("h1", {}, "Compare runs"), body);
  function update() {
    document.title = "Compare, fedlm watch";
    const there = ids.filter((id) => rows.has(id));
    const parts = [el("fieldset", {}, el("legend", {}, "Runs"), [...rows.values()].map((row) => el("label", {},
      el("input", { type: "checkbox", "data-key": `c-${row.id}`, checked: there.includes(row.id), onchange: (event) => {
        const next = event.target.checked ? [...there, row.id] : there.filter((id) => id !== row.id);
        location.hash = `#/compare/${next.map(encodeURIComponent).join("/")}`; } }), swatch(row.number), labelOf(row.id))))];
    const known = there.map((id) => [rows.get(id), details.get(id)]).filter(([, found]) => found && found.points);
    if (known.length) {
      const drawn = (what) => known.map(([row, found]) => curve(found, row, axis, what));
      parts.push(el("div", { class: "bar" }, axisChoice(axis, (name) => { axis = name; update(); })), el("div", { class: "pair" },
        el("section", {}, el("h2", {}, "Perplexity"), chart({ series: drawn("perplexity"), x: AXES[axis][0], y: "perplexity", log: true })),
        el("section", {}, el("h2", {}, "Training loss"), chart({ series: drawn("loss"), x: AXES[axis][0], y: "nats per token" }))),
        el("h2", {}, "Figures"), wide(el("table", { class: "runs" }, head(), el("tbody", {}, known.map(([row]) => runRow(row))))),
        el("h2", {}, "Settings that differ"), differing(known));
    } else parts.push(el("p", {}, "Choose two runs or more."));
    show(body, ...parts);
  }
  return { update, runs: ids };
}

function differing(known) {
  const names = [...new Set(known.flatMap(([, found]) => Object.keys(found.settings)))].sort();
  const text = (found, name) => found.settings[name] === undefined || found.settings[name] === null ? "–" : String(found.settings[name]);
  const differ = names.filter((name) => new Set(known.map(([, found]) => text(found, name))).size > 1);
  if (!differ.length) return el("p", {}, "None.");
  return wide(el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"),
    known.map(([row]) => el("th", { scope: "col" }, swatch(row.number), labelOf(row.id))))),
    el("tbody", {}, differ.map((name) => el("tr", {}, el("th", { scope: "row" }, name), known.map(([, found]) => el("td", {}, text(found, name))))))));
}

// ---- which view

function route() {
  const [, page, ...rest] = location.hash.slice(1).split("/");
  const ids = rest.filter(Boolean).map(decodeURIComponent);
  if (page === "run" && ids.length) view = runView(ids[0]);
  else if (page === "compare") { ids.forEach((id) => chosen.add(id)); view = compareView(ids.slice(0, 12)); }
  else if (page === "keyboard") view = keyboardView(main, rows, details, ids, labelOf, (body) => ask("/suggest", body));
  else view = homeView();
  for (const anchor of document.querySelectorAll("nav a")) {
    const here = anchor.getAttribute("href") === `#/${["compare", "keyboard"].includes(page) ? page : ""}`;
    if (here) anchor.setAttribute("aria-current", "page"); else anchor.removeAttribute("aria-current");
  }
  connect(view.runs);
  view.update();
}

window.addEventListener("hashchange", () => { route(); main.focus(); });
route();
