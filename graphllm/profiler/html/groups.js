// ---------------------------------------------------------------------------------------- the data

const report = JSON.parse(document.getElementById("profile").textContent);
const texts = report.texts;

/** A phase with its rows in columns: see reduce.py. */
class Phase {
  constructor(raw) {
    Object.assign(this, raw);
    this.count = raw.rows.op.length;
    this.plans = raw.typical.length;
    this.all = raw.tokens * raw.passes.length; // tokens of all passes
    this.wall = raw.closing.wall;
    const brief = raw.speed.median_ns < 1e6 * this.tokens; // less than a millisecond per token
    [this.unit, this.scale] = brief ? ["\u00b5s", 1e3] : ["ms", 1e6];
    this.searchTexts = []; // cached search text of each row
  }

  text(column, row) {
    return texts[this.rows[column][row]];
  }

  /** The op with the format of its weights. */
  kind(row) {
    return `${this.text("op", row)} ${this.text("weight", row)}`.trim();
  }

  /** The index of a step, with that of its plan if there are several plans. */
  step(row) {
    const { plan, step } = this.rows;
    return this.plans > 1 ? `${plan[row]}.${step[row]}` : String(step[row]);
  }

  /** A sum over all passes as time per token, in the unit of the phase. */
  each(ns) {
    return fixed(ns / this.scale / this.all, 3);
  }

  /** The same, followed by the unit. */
  perToken(ns) {
    return `${this.each(ns)} ${this.unit} per token`;
  }

  /** The text that the filter searches, in lower case. */
  searchText(row) {
    this.searchTexts[row] ??= [
      "op", "weight", "scope", "kernel", "backend", "parts", "origin", "why", "bound",
    ].map((column) => this.text(column, row)).join(" ").toLowerCase();
    return this.searchTexts[row];
  }

  get limited() {
    return this.rows.limit.some((limit) => limit !== null);
  }
}

const phases = report.phases.filter((phase) => phase.rows.op.length).map((raw) => new Phase(raw));

// ------------------------------------------------------------------------------------------ groups

const NONE = "\u2013";

const KEYS = {
  op: (phase, row) => phase.kind(row),
  scope: (phase, row) => phase.text("scope", row) || NONE,
  layer: (phase, row) => phase.rows.layer[row] ?? NONE,
  backend: (phase, row) => phase.text("backend", row),
  format: (phase, row) => phase.text("weight", row) || NONE,
  step: (phase, row) => row,
};

const SUMS = ["calls", "ns", "overlap", "bytes", "flops", "limit", "limited"];

/** Sum of rows. `limited`: time of rows with a ceiling; `limit`: their time at the ceiling. */
class Group {
  constructor(key) {
    Object.assign(this, { key, rows: [], bounds: new Map() });
    for (const name of SUMS) this[name] = 0;
  }

  add(phase, row) {
    const { calls, sum, overlap, bytes, flops, limit } = phase.rows;
    this.rows.push(row);
    this.calls += calls[row];
    this.ns += sum[row];
    this.overlap += overlap[row];
    this.bytes += bytes[row];
    this.flops += flops[row];
    if (limit[row] === null) return;
    this.limit += limit[row];
    this.limited += sum[row];
    const bound = phase.text("bound", row);
    this.bounds.set(bound, (this.bounds.get(bound) || 0) + limit[row]);
  }

  /** The resource that binds most of the time. */
  get bound() {
    return [...this.bounds].sort((a, b) => b[1] - a[1]).map(([name]) => name)[0] || "";
  }

  get gbs() {
    return this.ns ? this.bytes / this.ns : 0;
  }

  get gflops() {
    return this.ns ? this.flops / this.ns : 0;
  }

  /** Share of the ceiling that it reaches; null without a ceiling. */
  get share() {
    return this.limited && this.limit ? this.limit / this.limited : null;
  }

  /** Nanoseconds above the ceiling; null without a ceiling. */
  get headroom() {
    return this.limited && this.limit ? Math.max(0, this.limited - this.limit) : null;
  }
}

/** Group the rows for which `wanted` holds by `key`. */
function grouped(phase, key, wanted = () => true) {
  const groups = new Map();
  for (let row = 0; row < phase.count; row++) {
    if (!wanted(row)) continue;
    const own = key(phase, row);
    let group = groups.get(own);
    if (!group) groups.set(own, group = new Group(own));
    group.add(phase, row);
  }
  return [...groups.values()];
}

const longestFirst = (a, b) => b.ns - a.ns;

/** Names and values of a group for the tooltip. */
function facts(phase, group) {
  const { ns, bytes: moved, flops, share, headroom } = group;
  return [
    ["time", `${phase.perToken(ns)}, ${percent(ns / phase.wall)} of the wall time`],
    ["calls", `${fixed(group.calls / phase.passes.length)} per pass`],
    ["memory", moved && byteRate(1e9 * group.gbs)],
    ["arithmetic", flops && flopRate(1e9 * group.gflops)],
    ["of roofline", share !== null && `${percent(share)}, bound by ${group.bound}`],
    ["headroom", headroom !== null && phase.perToken(headroom)],
  ];
}

/** Assign a colour to each of the ops that take longest. */
function assignColours() {
  const spent = new Map();
  for (const phase of phases) {
    for (const { key, ns } of grouped(phase, (_, row) => phase.text("op", row))) {
      spent.set(key, (spent.get(key) || 0) + ns / phase.wall);
    }
  }
  [...spent].sort((a, b) => b[1] - a[1]).slice(0, HUES).forEach(([op], i) => hues.set(op, i));
}
