// ------------------------------------------------------------------------------------ the document

const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const p = (kind, ...children) => h("p", { class: kind }, children);
const swatch = (colour) => h("i", { class: "swatch", "--fill": colour });

/** A table row with a header cell and data cells. */
const tr = (first, cells) =>
  h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell)));

/** A small table: column names, rows made by `tr`, and an optional footer row. */
function listing(kind, heads, rows, last = null) {
  const head = h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)));
  return h("div", { class: "wide" }, h("table", { class: `listing ${kind}` },
    h("thead", {}, head), h("tbody", {}, rows), last && h("tfoot", {}, last)));
}

/** A row of radio buttons, one per option ([value, text]). */
function choice(id, label, options, chosen, chose) {
  const button = ([value, text]) => {
    const checked = value === chosen, onchange = () => chose(value);
    return h("label", {}, h("input", { type: "radio", name: id, value, checked, onchange }),
      h("span", {}, text));
  };
  return h("fieldset", { class: "choice", id }, h("legend", {}, label), options.map(button));
}

/** A section with a heading, controls to the right of it, and a line of explanation. */
function section(id, title, about, controls, ...content) {
  return h("section", { id, "aria-labelledby": `${id}-title` },
    h("div", { class: "title" }, h("h2", { id: `${id}-title` }, title), controls),
    p("about", about), content);
}

// ------------------------------------------------------------------------------------------- texts

/** Format a number with fixed decimals and thin spaces between thousands. */
function fixed(value, decimals = 0) {
  const [whole, rest] = Math.abs(value).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, "\u202f");
  const sign = value < 0 && /[1-9]/.test(whole + (rest || "")) ? "\u2212" : "";
  return sign + grouped + (rest ? `.${rest}` : "");
}

/** Format a number with about three significant digits. */
function short(value) {
  const size = Math.abs(value);
  return fixed(value, size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3);
}

/** Format a number with a unit; each unit is a thousand times the one before it. */
function scaled(value, units) {
  let index = 0;
  while (Math.abs(value) >= 999.5 && index < units.length - 1) {
    value /= 1000;
    index++;
  }
  const text = index === 0 && Number.isInteger(value) ? fixed(value) : short(value);
  return `${text}\u202f${units[index]}`;
}

const time = (ns) => scaled(ns, ["ns", "\u00b5s", "ms", "s"]);
const bytes = (count) => scaled(count, ["bytes", "kB", "MB", "GB", "TB"]);
const byteRate = (rate) => scaled(rate, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
const flopRate = (rate) =>
  scaled(rate, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]);
const percent = (share, decimals = 1) => `${fixed(100 * share, decimals)}\u202f%`;
const plural = (count, one, many = `${one}s`) => `${fixed(count)} ${count === 1 ? one : many}`;
const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

// ------------------------------------------------------------------------------------- the pointer

const tip = {
  /** Show a title and [name, value] lines near a point of the window. */
  show(title, lines, x, y) {
    const box = document.getElementById("tip");
    const known = lines.filter(([, value]) => value);
    box.replaceChildren(h("strong", {}, title),
      h("dl", {}, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight - 8 ? y - 14 - height : y + 14;
    box.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    box.style.top = `${Math.max(8, top)}px`;
  },

  hide() {
    document.getElementById("tip").hidden = true;
  },

  /** Hide when the pointer leaves, but not after a touch, which always leaves. */
  left(event) {
    if (event.pointerType !== "touch") tip.hide();
  },
};

// ----------------------------------------------------------------------------------------- colours

const HUES = 7; // the ops that take longest have their own colours, the others share one
const hues = new Map();

/** Index of an op's colour, the same in every drawing. */
const hue = (op) => hues.get(op) ?? HUES;
const fillOf = (op) => `var(--c${hue(op)})`;

/** Current colours, for canvases. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  const ops = Array.from({ length: HUES + 1 }, (_, i) => named(`--c${i}`));
  return {
    ops, on: ops.map((colour) => (luminance(colour) > 0.3 ? "#111" : "#fff")),
    ink: named("--ink"), soft: named("--ink-2"), line: named("--line"), lane: named("--lane"),
    paper: named("--panel"), host: named("--host"), font: `11px ${named("--font")}`,
  };
}

/** Approximate luminance of a colour `#rrggbb`; text on it is dark above 0.3. */
function luminance(colour) {
  const part = (at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2;
  return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
}

/** Legend of ops and their colours. */
function legend(ops) {
  const own = [...hues.keys()].filter((op) => ops.has(op));
  const entry = (name, colour) => h("li", {}, swatch(colour), name);
  return h("ul", { class: "legend" }, own.map((op) => entry(op, fillOf(op))),
    ops.size > own.length ? entry("other ops", `var(--c${HUES})`) : null);
}
