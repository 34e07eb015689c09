// ---------------------------------------------------------------------------------------- the data

const report = JSON.parse(document.getElementById("profile").textContent);
const texts = report.texts;

/** A phase, its rows in columns; see reduce.py. Texts of row `i` are `phase.text("op", i)`. */
class Phase {
  constructor(raw) {
    Object.assign(this, raw);
    this.count = raw.rows.op.length;
    this.plans = raw.typical.length;
    this.all = this.tokens * this.passes.length; // tokens of all passes
    this.wall = raw.closing.wall;
    const walls = this.passes.map((pass) => pass.end - pass.start);
    this.walls = walls.sort((a, b) => a - b);
    const perToken = this.wall / this.all / 1e6;
    this.decimals = Math.max(3, 3 - Math.floor(Math.log10(perToken || 1)));
  }

  text(column, row) {
    return texts[this.rows[column][row]];
  }

  /** An op with the format of its weights. */
  kind(row) {
    return `${this.text("op", row)} ${this.text("weight", row)}`.trim();
  }

  /** Milliseconds a token. */
  ms(ns) {
    return ns / 1e6 / this.all;
  }

  msText(ns) {
    return fixed(this.ms(ns), this.decimals);
  }

  get median() {
    const middle = this.walls.length >> 1;
    return this.walls.length % 2
      ? this.walls[middle] : (this.walls[middle - 1] + this.walls[middle]) / 2;
  }

  /** What a row can be found by, in small letters. */
  words(row) {
    this.found = this.found || [];
    this.found[row] ??= [
      "op", "weight", "scope", "kernel", "backend", "parts", "origin", "why", "bound",
    ].map((column) => this.text(column, row)).join(" ").toLowerCase();
    return this.found[row];
  }
}

const phases = report.phases.filter((phase) => phase.rows.op.length).map((raw) => new Phase(raw));

// ------------------------------------------------------------------------------------------ groups

const KEYS = {
  op: (phase, row) => phase.kind(row),
  scope: (phase, row) => phase.text("scope", row) || "\u2013",
  layer: (phase, row) => phase.rows.layer[row] ?? "\u2013",
  backend: (phase, row) => phase.text("backend", row),
  format: (phase, row) => phase.text("weight", row) || "\u2013",
  step: (phase, row) => row,
};

/** Rows summed. Rows without a known limit count in `ns`, but not in `limited`. */
class Group {
  constructor(key) {
    this.key = key;
    this.rows = [];
    this.calls = this.ns = this.overlap = this.bytes = this.flops = 0;
    this.limit = this.limited = this.gain = 0;
    this.bounds = new Map();
  }

  add(phase, row) {
    const columns = phase.rows;
    this.rows.push(row);
    this.calls += columns.calls[row];
    this.ns += columns.sum[row];
    this.overlap += columns.overlap[row];
    this.bytes += columns.bytes[row];
    this.flops += columns.flops[row];
    const limit = columns.limit[row];
    if (limit === null) return;
    this.limit += limit;
    this.limited += columns.sum[row];
    const bound = phase.text("bound", row);
    this.bounds.set(bound, (this.bounds.get(bound) || 0) + limit);
  }

  /** What binds most of it. */
  get bound() {
    const sorted = [...this.bounds].sort((a, b) => b[1] - a[1]);
    return sorted.length ? sorted[0][0] : "";
  }

  get gbs() {
    return this.ns ? this.bytes / this.ns : 0;
  }

  get gflops() {
    return this.ns ? this.flops / this.ns : 0;
  }

  /** The share of the limit that it reached; null where there is none. */
  get share() {
    return this.limited && this.limit ? this.limit / this.limited : null;
  }

  /** Nanoseconds to gain. */
  get toGain() {
    return this.limited && this.limit ? Math.max(0, this.limited - this.limit) : null;
  }
}

/** The rows that `wanted` takes, in groups of one key each. */
function grouped(phase, by, wanted = () => true) {
  const groups = new Map(), key = KEYS[by];
  for (let row = 0; row < phase.count; row++) {
    if (!wanted(row)) continue;
    const own = key(phase, row);
    let group = groups.get(own);
    if (!group) groups.set(own, group = new Group(own));
    group.add(phase, row);
  }
  return [...groups.values()];
}

/** Names and numbers of a group, as the pointer shows them. */
function facts(phase, group) {
  return [
    ["time", `${phase.msText(group.ns)} ms a token, ${percent(group.ns / phase.wall)} of the wall`],
    ["calls", fixed(group.calls, 0)],
    ["memory", group.bytes ? byteRate(1e9 * group.gbs) : ""],
    ["arithmetic", group.flops ? flopRate(1e9 * group.gflops) : ""],
    ["of the limit", group.share === null ? "" : `${percent(group.share)}, bound by ${group.bound}`],
    ["to gain", group.toGain === null ? "" : `${phase.msText(group.toGain)} ms a token`],
  ];
}

/** Gives the ops that take longest a colour each. */
function paint() {
  const spent = new Map();
  for (const phase of phases) {
    for (let row = 0; row < phase.count; row++) {
      const op = phase.text("op", row);
      spent.set(op, (spent.get(op) || 0) + phase.rows.sum[row] / phase.wall);
    }
  }
  [...spent].sort((a, b) => b[1] - a[1]).slice(0, HUES).forEach(([op], i) => hues.set(op, i));
}
