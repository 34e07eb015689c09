// Markdown of answers as elements. Text never becomes HTML: each element is created here, links have an
// address of a few schemes, and pictures are links. All of it takes time linear in the text, whatever the
// text, and nesting is bounded.

const MAX_NESTING = 8; // of quotations and lists; deeper ones are text
const MAX_MARKER = 16; // characters of a code fence, and of a run of backticks that opens code
const MAX_ADDRESS = 2000; // characters of a link's address
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const DELIMITERS = /^[ |:-]+$/; // second line of a table
const ADDRESS = /https?:\/\/[^\s<>"'`)\]]{1,500}/y;
const PLAIN = /[^`*_~[\]\\!h]+/y; // without the first character of any mark
const WORD = /[\p{L}\p{N}]/u;

/**
 * Visible text of the same length: a control character, such as the first one of an ANSI sequence,
 * becomes its picture.
 */
const visible = (text) =>
  text.replace(/\r\n/g, " \n").replace(/[\u2028\u2029]/g, "\n")
    .replace(/[\0-\x08\x0b-\x1f\x7f]/g, (sign) =>
      sign === "\x7f" ? "\u2421" : String.fromCharCode(0x2400 + sign.charCodeAt(0)));

// ------------------------------------------------------------------------------------------ blocks

/** Top-level blocks of a text: [offset of the first line, element]. The last one may be incomplete. */
function markdownBlocks(text) {
  const lines = visible(text).split("\n"), offsets = [];
  let offset = 0;
  for (const line of lines) {
    offsets.push(offset);
    offset += line.length + 1;
  }
  return parseBlocks(lines, 0).map(([line, element]) => [offsets[line], element]);
}

/** Blocks of some lines: [number of the first line, element]. */
function parseBlocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, element] = BLOCKS.reduce(
      (done, parse) => done || parse(lines, at, depth), null) || paragraph(lines, at);
    found.push([at, element]);
    at = end;
  }
  return found;
}

const elements = (lines, depth) => parseBlocks(lines, depth).map(([, element]) => element);

// Each takes the lines, the number of the first one and the nesting; each returns the number of the line
// after the block and its element, or null where no such block begins.
const BLOCKS = [fencedCode, heading, rule, quotation, list, table];

function fence(line) {
  const [, marker, info] = FENCE.exec(line) || [];
  if (!marker || marker.length > MAX_MARKER) return null;
  return marker[0] === "`" && info.includes("`") ? null : { marker, info: info.trim() };
}

function fencedCode(lines, at) {
  const open = fence(lines[at]);
  if (!open) return null;
  let end = at + 1;
  const closes = (line) => {
    const rest = line.trim();
    return rest.startsWith(open.marker) && rest.length <= MAX_MARKER &&
      rest === open.marker[0].repeat(rest.length);
  };
  while (end < lines.length && !closes(lines[end])) end++;
  return [end + 1, codeBlock(open.info.split(/\s/, 1)[0], lines.slice(at + 1, end).join("\n"))];
}

function codeBlock(language, text) {
  const copy = h("button", { type: "button", class: "copy", onclick: () => copyText(copy, text) },
    "Copy");
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language.slice(0, 40)), copy),
    h("pre", { tabindex: "0" }, h("code", {}, text)));
}

function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]) || [];
  // The page's own headings are levels 1 and 2.
  return marks ? [at + 1, h(`h${Math.min(6, marks.length + 2)}`, {}, inline(text || ""))] : null;
}

function rule(lines, at) {
  return lines[at].length < 200 && RULE.test(lines[at]) ? [at + 1, h("hr")] : null;
}

function quotation(lines, at, depth) {
  if (depth >= MAX_NESTING || !QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, h("blockquote", {}, elements(inner, depth + 1))];
}

const indentation = (line) => line.length - line.trimStart().length;

function item(line) {
  const [whole, spaces, marker, text] = ITEM.exec(line) || [];
  if (whole === undefined) return null;
  return { indent: spaces.length, ordered: marker.length > 1, number: parseInt(marker, 10), text };
}

function list(lines, at, depth) {
  const first = depth < MAX_NESTING ? item(lines[at]) : null;
  if (!first || first.indent > 3) return null;
  const items = [];
  while (at < lines.length) {
    const next = item(lines[at]);
    if (!next || next.indent > first.indent + 1 || next.ordered !== first.ordered) break;
    const inner = [next.text || ""];
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      if (line.trim() && indentation(line) < first.indent + 2) break;
      inner.push(line.slice(Math.min(indentation(line), first.indent + (next.ordered ? 3 : 2))));
    }
    items.push(h("li", {}, itemContent(inner, depth + 1)));
  }
  const start = first.ordered && first.number !== 1 ? { start: first.number } : {};
  return [at, h(first.ordered ? "ol" : "ul", start, items)];
}

/** The blocks of an item; a first paragraph is its text. */
function itemContent(lines, depth) {
  const [first, ...rest] = elements(lines, depth);
  if (!first) return [];
  return [first.tagName === "P" ? [...first.childNodes] : first, rest];
}

function table(lines, at) {
  const [head, line] = [lines[at], lines[at + 1] || ""];
  if (!head.includes("|") || !line.includes("|") || !line.includes("-") || !DELIMITERS.test(line))
    return null;
  const columns = cells(head).length;
  if (cells(line).length !== columns) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (tag, text) =>
    h("tr", {}, cells(text).slice(0, columns).map((cell) => h(tag, {}, inline(cell))));
  const body = lines.slice(at + 2, end).map((text) => row("td", text));
  return [end, h("div", { class: "wide", tabindex: "0" },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, body)))];
}

/** Cells of a row of a table; `\|` is text. */
function cells(line) {
  const found = line.trim().replace(/^\|/, "").split("|"), joined = [];
  for (const cell of found) {
    const last = joined.length - 1;
    if (last >= 0 && joined[last].endsWith("\\")) joined[last] = `${joined[last].slice(0, -1)}|${cell}`;
    else joined.push(cell);
  }
  if (joined.length > 1 && !joined[joined.length - 1].trim()) joined.pop();
  return joined.map((cell) => cell.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  const ends = (line) => !line.trim() || fence(line) || HEADING.test(line) || QUOTE.test(line) ||
    (item(line) || { indent: 9 }).indent < 4;
  while (end < lines.length && !ends(lines[end])) end++;
  return [end, h("p", {}, inline(lines.slice(at, end).join("\n").trim()))];
}

// ------------------------------------------------------------------------------------- within a line

/** Where runs of backticks begin, by their length; the first one is last. */
function backtickRuns(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  for (const starts of runs.values()) starts.reverse();
  return runs;
}

/** Nodes of a text with marks: code, emphasis, links. */
function inline(text) {
  return new InlineParser(text).nodes();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.runs = backtickRuns(text);
    this.open = [{ mark: "", nodes: [] }]; // marks that have not been closed, outermost first
  }

  nodes() {
    while (this.at < this.text.length) {
      const sign = this.text[this.at];
      if (sign === "`") this.code();
      else if (sign === "\\") this.escape();
      else if (sign === "*" || sign === "_" || sign === "~") this.emphasis(sign);
      else if (sign === "[") this.openLink(1);
      else if (sign === "!" && this.text[this.at + 1] === "[") this.openLink(2);
      else if (sign === "]") this.closeLink();
      else if (sign === "h") this.address();
      else this.plain();
    }
    this.discard(1);
    return this.open[0].nodes;
  }

  /** Add an element, or text, which joins the text before it. */
  add(node) {
    const { nodes } = this.open[this.open.length - 1], last = nodes.length - 1;
    if (typeof node === "string" && typeof nodes[last] === "string") nodes[last] += node;
    else nodes.push(node);
  }

  /** Add `count` characters as they are. */
  literal(count) {
    this.add(this.text.slice(this.at, this.at + count));
    this.at += count;
  }

  /** The marks from `first` on were text. */
  discard(first) {
    while (this.open.length > first) {
      const { mark, nodes } = this.open.pop();
      this.add(mark);
      for (const node of nodes) this.add(node);
    }
  }

  plain() {
    PLAIN.lastIndex = this.at;
    const found = PLAIN.exec(this.text);
    this.literal(found ? found[0].length : 1);
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return this.literal(1);
    this.add(next);
    this.at += 2;
  }

  code() {
    let length = 1;
    while (this.text[this.at + length] === "`") length++;
    const starts = this.runs.get(length) || [];
    while (starts.length && starts[starts.length - 1] <= this.at) starts.pop();
    if (length > MAX_MARKER || !starts.length) return this.literal(length);
    const end = starts[starts.length - 1], inner = this.text.slice(this.at + length, end);
    const padded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
    this.add(h("code", {}, padded ? inner.slice(1, -1) : inner));
    this.at = end + length;
  }

  emphasis(sign) {
    let length = 1;
    while (this.text[this.at + length] === sign) length++;
    if (length > 3 || (sign === "~" && length !== 2)) return this.literal(length);
    const before = this.text[this.at - 1] || " ", after = this.text[this.at + length] || " ";
    const inWord = sign === "_" && WORD.test(before) && WORD.test(after);
    const closes = !/\s/.test(before) && !inWord, opens = !/\s/.test(after) && !inWord;
    const top = this.open[this.open.length - 1].mark;
    const own = [1, 2].map((n) => sign.repeat(n)).filter((mark) => mark.length <= length);
    const closed = closes && (own.find((mark) => mark === top) ||
      own.reverse().find((mark) => this.find(mark) > 0));
    if (closed) this.closeEmphasis(closed);
    else if (opens) this.openMark(sign.repeat(length === 1 ? 1 : 2));
    else this.literal(length);
  }

  find(mark) {
    return this.open.findIndex((each, index) => index > 0 && each.mark === mark);
  }

  /** Only one of a mark is open at a time, so that nesting is bounded. */
  openMark(mark) {
    const same = this.find(mark);
    if (same > 0) this.discard(same);
    this.open.push({ mark, nodes: [] });
    this.at += mark.length;
  }

  closeEmphasis(mark) {
    const index = this.find(mark);
    this.discard(index + 1);
    const { nodes } = this.open.pop();
    const tag = mark[0] === "~" ? "del" : mark.length === 2 ? "strong" : "em";
    this.add(h(tag, {}, nodes));
    this.at += mark.length;
  }

  openLink(length) {
    const mark = this.text.slice(this.at, this.at + length);
    const index = Math.max(this.find("["), this.find("!["));
    if (index > 0) this.discard(index);
    this.openMark(mark);
  }

  closeLink() {
    const index = Math.max(this.find("["), this.find("!["));
    const end = index > 0 && this.text[this.at + 1] === "("
      ? this.text.slice(this.at + 2, this.at + 3 + MAX_ADDRESS).search(/[\s()]/) : -1;
    const close = this.at + 2 + end;
    const found = end > 0 && this.text[close] === ")"
      ? link(this.text.slice(this.at + 2, close)) : null;
    if (!found) {
      if (index > 0) this.discard(index);
      return this.literal(1);
    }
    this.discard(index + 1);
    const { nodes } = this.open.pop();
    this.add(fill(found, {}, nodes.length ? nodes : [found.href]));
    this.at = close + 1;
  }

  /** An address in the text. */
  address() {
    const inLink = Math.max(this.find("["), this.find("![")) > 0;
    ADDRESS.lastIndex = this.at;
    const match = inLink || WORD.test(this.text[this.at - 1] || " ") ? null : ADDRESS.exec(this.text);
    const text = match && match[0].replace(/[.,;:!?]$/, ""), found = text && link(text);
    if (!found) return this.literal(match ? match[0].length : 1);
    this.add(fill(found, {}, [text]));
    this.at += text.length;
  }
}

/** A link without text, which opens another window; null unless the address has one of SCHEMES. */
function link(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!SCHEMES.has(url.protocol)) return null;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
}
