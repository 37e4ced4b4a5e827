// SHA-256 of a text, as 64 hexadecimal digits: labels are sealed with it. Browsers' own is missing where a notebook is served
// without encryption.

function sha256(text) {
  const rotate = (x, n) => (x >>> n) | (x << (32 - n));
  const fraction = x => ((x - Math.floor(x)) * 2 ** 32) >>> 0;
  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every(p => n % p)) primes.push(n);
  const constants = primes.map(p => fraction(Math.cbrt(p)));
  const state = primes.slice(0, 8).map(p => fraction(Math.sqrt(p)));
  const bytes = new TextEncoder().encode(text), length = bytes.length;
  const padded = new Uint8Array(((length + 8 >> 6) + 1) << 6);
  padded.set(bytes);
  padded[length] = 0x80;
  const view = new DataView(padded.buffer), word = new Uint32Array(64);
  view.setUint32(padded.length - 8, Math.floor(length / 2 ** 29));
  view.setUint32(padded.length - 4, length << 3);
  for (let start = 0; start < padded.length; start += 64) {
    for (let i = 0; i < 16; i++) word[i] = view.getUint32(start + 4 * i);
    for (let i = 16; i < 64; i++) {
      const a = word[i - 15], b = word[i - 2];
      word[i] = word[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >>> 3) + word[i - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >>> 10);
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const first = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + (e & f ^ ~e & g) + constants[i] + word[i] | 0;
      const second = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + (a & b ^ a & c ^ b & c) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, d + first | 0, c, b, a, first + second | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((value, i) => { state[i] = state[i] + value >>> 0; });
  }
  return state.map(value => value.toString(16).padStart(8, "0")).join("");
}

// A value as Python's json.dumps(sort_keys=True, separators=(",", ":")) writes it; strings, whole numbers, lists and mappings of them.
function canonical(value) {
  if (typeof value === "string") {
    return JSON.stringify(value).replace(/[\u007f-\uffff]/g, c => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  }
  if (typeof value === "number") return String(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  return `{${Object.keys(value).sort().map(key => `${canonical(key)}:${canonical(value[key])}`).join(",")}}`;
}

// The lines of a file for UnitLabels.load, each with its place and a hash over it (swd_lens/analysis/audit/labels.py).
function labelLines(entries) {
  const placed = entries.map((entry, i) => ({ ...entry, line: i + 1, lines: entries.length }));
  const sealed = placed.map(entry => ({ ...entry, sha256: "swd_lens " + sha256(canonical({ values: entry })) }));
  return sealed.map(entry => JSON.stringify(entry) + "\n").join("");
}
