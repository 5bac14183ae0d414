// A recurrent language model in plain JavaScript (or another one by onnxruntime-web), its tokenizer and suggestions.
// The same arithmetic as fedlm's own (src/fedlm/models/recurrent.py, src/fedlm/inference.py).
"use strict";

// ---- arithmetic

// out = matrix * vector, rows of the matrix one after the other.
function multiply(matrix, rows, columns, vector, out) {
  for (let row = 0; row < rows; row++) {
    let sum = 0;
    const at = row * columns;
    for (let column = 0; column < columns; column++) sum += matrix[at + column] * vector[column];
    out[row] = sum;
  }
  return out;
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

function powerNorm(x, floor, power) {
  const most = MEASURES.max(x, floor), total = x.reduce((sum, v) => sum + Math.pow(v / most, power), 0);
  return most * Math.pow(Math.max(total, 0.5), 1 / power);
}

const MEASURES = {
  max: (x, floor) => x.reduce((most, v) => Math.max(most, Math.abs(v)), floor),
  p8: (x, floor) => powerNorm(x, floor, 8),
  p16: (x, floor) => powerNorm(x, floor, 16),
  l2: (x, floor) => Math.sqrt(Math.max(x.reduce((sum, v) => sum + v * v, 0), floor * floor)),
  rms: (x, floor) => Math.sqrt(Math.max(x.reduce((sum, v) => sum + v * v, 0) / x.length, floor * floor)),
  none: () => 1,
};

const RECTIFIERS = {
  relu: (x) => x.map((v) => Math.max(0, v)),
  soft: (x) => { const corner = 0.04 * Math.max(x.reduce((sum, v) => sum + v * v, 0) / x.length, 1e-24);
    return x.map((v) => 0.5 * (v + Math.sqrt(v * v + corner))); },
};

function standardize(x) {
  const mean = x.reduce((sum, v) => sum + v, 0) / x.length;
  const centred = x.map((v) => v - mean), scale = MEASURES.rms(centred, 1e-6);
  return centred.map((v) => v / scale);
}

// One time step: pre-activations by gate, and the state; returns what is emitted, and the next state.
const CELLS = {
  lstm: (cell, [i, f, o, g], c) => {
    const next = c.map((v, n) => sigmoid(f[n]) * v + sigmoid(i[n]) * Math.tanh(g[n]));
    return [next.map((v, n) => sigmoid(o[n]) * Math.tanh(v)), next];
  },
  cifg: (cell, [f, o, g], c) => {
    const next = c.map((v, n) => { const keep = sigmoid(f[n]); return keep * v + (1 - keep) * Math.tanh(g[n]); });
    return [next.map((v, n) => sigmoid(o[n]) * Math.tanh(v)), next];
  },
  "si-cifg": (cell, [f, o, g], c) => {
    const divide = (x, floor) => { const size = MEASURES[cell.measure](x, floor); return x.map((v) => v / size); };
    const norm = (x) => divide(x, cell.floor);
    const positive = (x) => divide(RECTIFIERS[cell.rectifier || "relu"](x),
      MEASURES.max(x.map((v) => v * (cell.scaled_floor || 0)), cell.floor));
    const keep = positive(f), candidate = cell.candidate ? norm(g) : g;
    const next = c.map((v, n) => keep[n] * v + (1 - keep[n]) * candidate[n]);
    const shown = cell.state ? norm(next) : next, open = positive(o);
    return [shown.map((v, n) => open[n] * v), next];
  },
};

class Model {
  // config.arrays: [{name, shape, type, offset}]; an int8 matrix has a float32 scale for each row before it.
  constructor(config, buffer) {
    this.config = config;
    const arrays = {};
    for (const { name, shape, type, offset } of config.arrays) {
      const size = shape.reduce((a, b) => a * b, 1);
      if (type === "float32") arrays[name] = new Float32Array(buffer, offset, size);
      else {
        const scales = new Float32Array(buffer, offset, shape[0]), columns = size / shape[0];
        const raw = new Int8Array(buffer, offset + 4 * shape[0], size);
        arrays[name] = Float32Array.from(raw, (v, n) => v * scales[Math.floor(n / columns)]);
      }
    }
    this.embedding = arrays.embedding;
    [this.vocabulary, this.width] = config.arrays.find((a) => a.name === "embedding").shape;
    this.layers = Array.from({ length: config.layers }, (_, n) => ({
      wx: arrays[`layers.${n}.w_x`], wh: arrays[`layers.${n}.w_h`],
      bias: arrays[`layers.${n}.bias`], project: arrays[`layers.${n}.project`] }));
  }

  start() {
    const { units } = this.config;
    return this.layers.map(() => [new Float32Array(this.width), new Float32Array(units)]);
  }

  advance(state, token) {
    const { units, gates, cell } = this.config, E = this.width;
    let x = this.embedding.subarray(token * E, (token + 1) * E);
    const after = this.layers.map((layer, n) => {
      const [h, c] = state[n];
      const z = multiply(layer.wx, gates * units, E, x, new Float32Array(gates * units));
      const more = multiply(layer.wh, gates * units, E, h, new Float32Array(gates * units));
      for (let k = 0; k < z.length; k++) z[k] += more[k] + layer.bias[k];
      let parts = Array.from({ length: gates }, (_, g) => z.subarray(g * units, (g + 1) * units));
      if (cell.layer_norm) parts = parts.map(standardize);
      const [m, next] = CELLS[cell.kind](cell, parts, c);
      x = multiply(layer.project, E, units, m, new Float32Array(E));
      return [x, next];
    });
    return { state: after, logits: multiply(this.embedding, this.vocabulary, E, x, new Float32Array(this.vocabulary)) };
  }
}

// A model of any other kind, by an onnxruntime-web that was put beside the page. The state, such as a
// key-value cache, goes in and out with every step.
class OnnxModel {
  static async open(config, ort, buffer) {
    const made = new OnnxModel();
    Object.assign(made, { ort, states: config.states, capacity: config.capacity });
    made.session = await ort.InferenceSession.create(new Uint8Array(buffer), { executionProviders: ["wasm"] });
    return made;
  }

  start() {
    const kinds = { float32: Float32Array, int32: Int32Array };
    return this.states.map(({ type, shape }) =>
      new this.ort.Tensor(type, new kinds[type](shape.reduce((a, b) => a * b, 1)), shape));
  }

  async advance(state, token) {
    const feeds = { token: new this.ort.Tensor("int32", Int32Array.of(token), [1]) };
    this.states.forEach(({ name }, n) => { feeds[name] = state[n]; });
    const found = await this.session.run(feeds);
    return { state: this.states.map(({ next }) => found[next]), logits: found.logits.data };
  }
}

// ---- tokens

const WORD = /[\p{L}\p{M}\p{N}_]+(?:['’\-][\p{L}\p{M}\p{N}_]+)*|[^\s\p{L}\p{M}\p{N}_]/gu;
const PIECE = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;
const LINE_END = /[\r\n]+/;

// The signs that stand for bytes in a byte-level vocabulary.
const SIGNS = (() => {
  const signs = [], visible = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  for (let byte = 0, next = 256; byte < 256; byte++) signs.push(String.fromCodePoint(visible(byte) ? byte : next++));
  return signs;
})();
const BYTE_OF = new Map(SIGNS.map((sign, byte) => [sign, byte]));
const toSigns = (text) => Array.from(new TextEncoder().encode(text), (byte) => SIGNS[byte]).join("");
const fromSigns = (text) => new TextDecoder().decode(Uint8Array.from(Array.from(text), (sign) => BYTE_OF.get(sign) ?? 63));

class Tokenizer {
  constructor(json, special) {
    this.special = special;
    this.whole = json.model.type === "WordLevel"; // a token is a word
    this.vocab = new Map(Object.entries(json.model.vocab));
    for (const { content, id } of json.added_tokens || []) this.vocab.set(content, id);
    this.size = Math.max(...this.vocab.values()) + 1;
    this.words = new Array(this.size).fill("");
    for (const [word, id] of this.vocab) this.words[id] = word;
    this.ranks = new Map((json.model.merges || []).map((pair, n) => [Array.isArray(pair) ? pair.join(" ") : pair, n]));
    const steps = json.normalizer === null ? [] : json.normalizer.normalizers || [json.normalizer];
    this.steps = steps.map((step) => step.type);
    this.prefixSpace = !this.whole && json.pre_tokenizer.add_prefix_space;
  }

  normalize(text) {
    for (const step of this.steps) {
      // Letter by letter, as the tokenizer's library does.
      text = step === "NFC" ? text.normalize("NFC") : Array.from(text, (c) => c.toLowerCase()).join("");
    }
    return text;
  }

  line(text) {
    const line = this.normalize(text);
    if (this.whole) return (line.match(WORD) || []).map((word) => this.vocab.get(word) ?? this.special.oov);
    const spaced = this.prefixSpace && !line.startsWith(" ") ? ` ${line}` : line;
    return (spaced.match(PIECE) || []).flatMap((piece) => this.merge(toSigns(piece)));
  }

  merge(piece) {
    let parts = Array.from(piece);
    while (parts.length > 1) {
      let best = Infinity, at = -1;
      for (let n = 0; n + 1 < parts.length; n++) {
        const rank = this.ranks.get(`${parts[n]} ${parts[n + 1]}`);
        if (rank !== undefined && rank < best) { best = rank; at = n; }
      }
      if (at < 0) break;
      const [a, b] = [parts[at], parts[at + 1]], joined = [];
      for (let n = 0; n < parts.length; n++) {
        if (parts[n] === a && parts[n + 1] === b) { joined.push(a + b); n++; } else joined.push(parts[n]);
      }
      parts = joined;
    }
    return parts.map((part) => this.vocab.get(part)).filter((id) => id !== undefined);
  }

  // The tokens of what stands before a word; a line that was ended has its end.
  context(before) {
    const text = before.replace(/ +$/, ""), tokens = [];
    for (const line of text.split(LINE_END)) {
      const found = line.trim() ? this.line(line) : [];
      if (found.length) tokens.push(...found, this.special.eos);
    }
    if (!text.endsWith("\n")) tokens.pop();
    return tokens;
  }
}

// ---- suggestions

const LONGEST_WORD = 12, SEARCH_STEPS = 24, MOST_TOKENS = 256;

function logSum(logits) {
  let top = -Infinity, sum = 0;
  for (const v of logits) if (v > top) top = v;
  for (const v of logits) sum += Math.exp(v - top);
  return top + Math.log(sum);
}

const likeliest = (tokens, logits, count) =>
  tokens.sort((a, b) => logits[b] - logits[a] || a - b).slice(0, count);

class Typist {
  constructor(model, tokenizer) {
    this.model = model; this.tokenizer = tokenizer; this.path = [];
    const reserved = new Set(tokenizer.special.reserved);
    const letters = /[\p{L}\p{N}]/u;
    this.tokens = tokenizer.words.flatMap((word, id) => !word || reserved.has(id)
      || (tokenizer.whole && !letters.test(word)) ? [] : [id]);
  }

  static begun(text) { return /[\p{L}\p{M}\p{N}_'’-]*$/u.exec(text)[0].replace(/^['’-]+/, ""); }

  // The likeliest words that begin as the text ends: [[word, probability], ...]. One question at a
  // time: the path that is remembered is that of the last text.
  async suggest(text, count = 3) {
    const begun = Typist.begun(text), before = text.slice(0, text.length - begun.length);
    const last = await this.after([this.tokenizer.special.bos, ...this.tokenizer.context(before)]);
    const typed = this.tokenizer.normalize(begun);
    if (this.tokenizer.whole) {
      const fits = this.tokens.filter((id) => this.tokenizer.words[id].startsWith(typed));
      const total = logSum(last.logits);
      return likeliest(fits, last.logits, count).map((id) => [this.tokenizer.words[id], Math.exp(last.logits[id] - total)]);
    }
    const spaced = !before || /\s$/.test(before), marked = spaced && (before || this.tokenizer.prefixSpace);
    return this.search(last, (marked ? SIGNS[32] : "") + toSigns(typed), count);
  }

  // The state after tokens, going on from the longest beginning that is known.
  async after(tokens) {
    const most = this.model.capacity || MOST_TOKENS;
    if (tokens.length > most - LONGEST_WORD) tokens = tokens.slice(-Math.floor(most / 2));
    let same = 0;
    while (same < tokens.length && same < this.path.length && this.path[same].token === tokens[same]) same++;
    this.path.length = same;
    for (const token of tokens.slice(same)) {
      const state = this.path.length ? this.path[this.path.length - 1].state : this.model.start();
      this.path.push({ token, ...await this.model.advance(state, token) });
    }
    return this.path[this.path.length - 1];
  }

  goesOn(id) {
    const piece = this.tokenizer.words[id];
    return /^\p{L}+$/u.test(piece) && !piece.startsWith(SIGNS[32]) && !this.tokenizer.special.reserved.includes(id);
  }

  // Words of several tokens: the likeliest beginnings are followed first.
  async search(last, target, count) {
    const found = new Map(), open = [];
    let steps = SEARCH_STEPS;
    const expand = (nats, spelling, at) => {
      const rest = target.slice(spelling.length), total = logSum(at.logits);
      const fits = this.tokens.filter((id) => this.tokenizer.words[id].startsWith(rest)
        || rest.startsWith(this.tokenizer.words[id]));
      for (const id of likeliest(fits, at.logits, 2 * count)) {
        open.push({ nats: nats + total - at.logits[id], spelling: spelling + this.tokenizer.words[id], at, id });
      }
      open.sort((a, b) => a.nats - b.nats);
    };
    expand(0, "", last);
    while (open.length && found.size < count && steps > 0) {
      let { nats, spelling, at, id } = open.shift();
      let here = await this.model.advance(at.state, id);
      steps--;
      if (!spelling.startsWith(target)) { expand(nats, spelling, here); continue; }
      for (let n = 0; n < LONGEST_WORD; n++) {
        const next = here.logits.reduce((best, v, k) => (v > here.logits[best] ? k : best), 0);
        if (!this.goesOn(next)) break;
        nats += logSum(here.logits) - here.logits[next];
        spelling += this.tokenizer.words[next];
        steps--;
        here = await this.model.advance(here.state, next);
      }
      const word = fromSigns(spelling).replace(/^ +| +$/g, "");
      if (/[\p{L}\p{N}]/u.test(word)) found.set(word, Math.max(found.get(word) || 0, Math.exp(-nats)));
    }
    return [...found].sort((a, b) => b[1] - a[1]);
  }
}

if (typeof module !== "undefined") module.exports = { Model, OnnxModel, Tokenizer, Typist };
