// The page of an exported keyboard: nothing is sent anywhere.
"use strict";

const field = document.getElementById("text"), words = document.getElementById("words"), said = document.getElementById("said");

// From a web server the weights are a binary file; a page opened from disk may not read one, so the
// same bytes lie beside it as text.
async function weights() {
  if (location.protocol !== "file:") return (await fetch("model.bin")).arrayBuffer();
  await new Promise((done, failed) => {
    const script = Object.assign(document.createElement("script"), { src: "weights.js", onload: done, onerror: failed });
    document.head.append(script);
  });
  return Uint8Array.from(atob(window.FEDLM_WEIGHTS), (c) => c.charCodeAt(0)).buffer;
}

async function begin() {
  const config = window.FEDLM;
  document.getElementById("about").textContent = config.about;
  const typist = new Typist(new Model(config, await weights()), new Tokenizer(config.tokenizer, config.special));
  function show() {
    const began = performance.now(), found = typist.suggest(field.value.slice(-4000));
    words.replaceChildren(...found.map(([word, chance]) => {
      const button = document.createElement("button"), small = document.createElement("small");
      button.type = "button";
      small.textContent = `${(100 * chance).toFixed(chance < .1 ? 1 : 0)}%`;
      button.append(word, small);
      button.addEventListener("click", () => {
        field.value = `${field.value.slice(0, field.value.length - Typist.begun(field.value).length)}${word} `;
        field.focus();
        show();
      });
      return button;
    }));
    words.dataset.after = field.value;
    said.textContent = `The last answer took ${Math.round(performance.now() - began)} ms, on this device.`;
  }
  field.addEventListener("input", show);
  show();
}

begin().catch((error) => { said.textContent = `The model could not be loaded: ${error.message || "weights.js is missing"}.`; });
