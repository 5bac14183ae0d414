// A keyboard: three suggestions per model above one text field.

import { el, swatch } from "./draw.js";

// `ask({id, node, kind, text})` answers with [{word, probability}, ...].
export function keyboardView(main, rows, details, ids, labelOf, ask) {
  const boards = new Map(); // by key: {model, words, box, said, busy, wanted}
  const chosen = new Set();
  const choice = el("fieldset", {}, el("legend", {}, "Models side by side"));
  const place = el("div", { class: "boards" });
  const field = el("textarea", { id: "text", autocomplete: "off", autocapitalize: "none", spellcheck: "false", oninput: all });
  const timing = el("p", { class: "quiet", role: "status" });
  main.replaceChildren(el("h1", {}, "Keyboard"), choice, place,
    el("p", {}, el("label", { for: "text" }, "Type here; the words above are what each model expects.")), field, timing);
  document.title = "Keyboard, fedlm watch";
  let known = "";

  function models() {
    const found = [];
    for (const id of ids) for (const model of (details.get(id) || {}).models || []) {
      found.push({ key: `${id}\n${model.node}\n${model.kind}`, id, ...model });
    }
    return found;
  }

  function update() {
    if (!ids.length) { // nothing chosen: the runs that have a model
      const there = [...rows.values()].filter((row) => row.state === "finished");
      choice.replaceChildren(el("legend", {}, "Whose model?"), ...(there.length ? there.map((row) =>
        el("label", {}, el("input", { type: "checkbox", value: row.id }), swatch(row.number), labelOf(row.id))) : [el("p", {}, "No run is finished yet.")]),
        el("button", { type: "button", onclick: () => {
          const picked = [...choice.querySelectorAll("input:checked")].map((box) => encodeURIComponent(box.value));
          if (picked.length) location.hash = `#/keyboard/${picked.join("/")}`; } }, "Type with these"));
      return;
    }
    const found = models(), now = found.map((model) => model.key).join("\t");
    if (now === known) return;
    known = now;
    for (const model of found.filter((m, n) => n < 1 || (ids.length > 1 && m.node === "" && m.kind === "last"))) chosen.add(model.key);
    choice.replaceChildren(el("legend", {}, "Models side by side"), ...found.map((model) => el("label", {},
      el("input", { type: "checkbox", checked: chosen.has(model.key), onchange: (event) => {
        chosen[event.target.checked ? "add" : "delete"](model.key); draw(found); } }), `${labelOf(model.id)}, ${model.name}`)));
    draw(found);
  }

  function draw(found) {
    for (const key of [...boards.keys()]) if (!chosen.has(key)) boards.delete(key);
    for (const model of found) {
      if (!chosen.has(model.key) || boards.has(model.key)) continue;
      const words = el("div", { class: "words", role: "group", "aria-label": `Suggestions of ${labelOf(model.id)}, ${model.name}` });
      const said = el("p", { class: "problem" });
      const row = rows.get(model.id);
      const box = el("section", { class: "board" }, el("h2", {}, row ? swatch(row.number) : null, `${labelOf(model.id)}, ${model.name}`), words, said);
      boards.set(model.key, { model, words, box, said, busy: false, wanted: null });
    }
    place.replaceChildren(...[...boards.values()].map((board) => board.box));
    all();
  }

  function all() { for (const board of boards.values()) question(board); }

  // One question at a time per model; of those typed meanwhile only the last is asked.
  async function question(board) {
    board.wanted = field.value;
    if (board.busy) return;
    board.busy = true;
    while (board.wanted !== null) {
      const text = board.wanted.slice(-8000);
      board.wanted = null;
      const began = performance.now();
      try {
        const words = await ask({ id: board.model.id, node: board.model.node, kind: board.model.kind, text });
        board.said.textContent = "";
        board.words.dataset.after = text;
        board.words.replaceChildren(...words.map(({ word, probability }) => el("button", { type: "button", onclick: () => take(word) },
          word, el("small", {}, `${(100 * probability).toFixed(probability < .1 ? 1 : 0)}%`))));
        timing.textContent = `The last answer took ${Math.round(performance.now() - began)} ms.`;
      } catch (error) { board.said.textContent = error.message; }
    }
    board.busy = false;
  }

  function take(word) {
    const begun = /[\p{L}\p{M}\p{N}_'’-]*$/u.exec(field.value)[0].replace(/^['’-]+/, "");
    field.value = `${field.value.slice(0, field.value.length - begun.length)}${word} `;
    field.focus();
    all();
  }

  return { update, runs: ids };
}
