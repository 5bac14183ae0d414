// The page of an exported keyboard: nothing is sent anywhere.
"use strict";

const field = document.getElementById("text"), words = document.getElementById("words"), said = document.getElementById("said");

const script = (src) => new Promise((done, failed) => {
  document.head.append(Object.assign(document.createElement("script"), { src, onload: done, onerror: () => failed(new Error(`${src} is missing`)) }));
});
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

// From a web server the weights are a binary file; a page opened from disk may not read one, so the
// same bytes lie beside it as text.
async function weights(file) {
  if (location.protocol !== "file:") {
    const answer = await fetch(file);
    if (!answer.ok) throw new Error(`${file} is missing`);
    return answer.arrayBuffer();
  }
  await script("weights.js");
  return bytes(window.FEDLM_WEIGHTS).buffer;
}

async function open(config) {
  if (!config.onnx) return new Model(config, await weights("model.bin"));
  await script("runtime.js");
  const { program, wasm } = window.FEDLM_RUNTIME, address = URL.createObjectURL(new Blob([bytes(program)], { type: "text/javascript" }));
  const loaded = await import(address), ort = loaded.InferenceSession ? loaded : loaded.default;
  Object.assign(ort.env.wasm, { wasmBinary: bytes(wasm).buffer, numThreads: 1, proxy: false });
  return OnnxModel.open(config, ort, await weights("model.onnx"));
}

function button(word, chance, show) {
  const made = document.createElement("button"), small = document.createElement("small");
  made.type = "button";
  small.textContent = `${(100 * chance).toFixed(chance < .1 ? 1 : 0)}%`;
  made.append(word, small);
  made.addEventListener("click", () => {
    field.value = `${field.value.slice(0, field.value.length - Typist.begun(field.value).length)}${word} `;
    field.focus();
    show();
  });
  return made;
}

async function begin() {
  const config = window.FEDLM;
  document.getElementById("about").textContent = config.about;
  const typist = new Typist(await open(config), new Tokenizer(config.tokenizer, config.special));
  let busy = false, wanted = null;
  async function show() { // one question at a time; of those typed meanwhile only the last is asked
    wanted = field.value;
    if (busy) return;
    busy = true;
    while (wanted !== null) {
      const text = wanted, began = performance.now();
      wanted = null;
      const found = await typist.suggest(text.slice(-4000));
      words.replaceChildren(...found.map(([word, chance]) => button(word, chance, show)));
      words.dataset.after = text;
      said.textContent = `The last answer took ${Math.round(performance.now() - began)} ms, on this device.`;
    }
    busy = false;
  }
  field.addEventListener("input", show);
  await show();
}

begin().catch((error) => { said.textContent = `The model could not be loaded: ${error.message || error}.`; });
