// ---------------------------------------------------------------------------------------- roofline

const LARGE = 0.01; // the axes cover dots above this share of the wall time
const MARKS = ["circle", "square", "diamond"]; // of backends, in order of priority

/** Roofline plot: FLOP/s over operations per byte, both logarithmic; areas of dots are time. */
function roofline(phase, width) {
  const key = (_, row) => `${phase.kind(row)}\n${phase.text("backend", row)}`;
  const groups = grouped(phase, key).sort(longestFirst)
    .filter((dot) => dot.ns && dot.bytes && dot.flops);
  for (const dot of groups) {
    [dot.key, dot.backend] = dot.key.split("\n");
    dot.op = phase.text("op", dot.rows[0]);
  }
  const backends = [...new Set(groups.map((dot) => dot.backend))];
  const height = Math.round(Math.min(560, Math.max(300, width * 0.95)));
  const large = groups.filter((dot) => dot.ns > LARGE * phase.wall);
  const plot = axes(large.length ? large : groups, backends, width, height);
  const { labels } = plot, { left, right, top, bottom } = plot.box;
  for (const dot of groups) {
    const x = plot.x(dot.flops / dot.bytes), y = plot.y(1e9 * dot.gflops);
    dot.cx = Math.max(left, Math.min(x, right));
    dot.cy = Math.max(top, Math.min(y, bottom));
    dot.edge = dot.cx !== x || dot.cy !== y;
    dot.r = Math.max(3.5, Math.min(30, width / 16) * Math.sqrt(dot.ns / phase.wall));
    labels.marks.push(around(dot.cx, dot.cy, 2 * dot.r - 2));
  }
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, class: "roofline", role: "group",
    "aria-label": "roofline plot",
  }, grid(plot), ceilingLines(plot, backends), dots(phase, groups, backends), names(plot, large));
  const rest = phase.count - groups.reduce((sum, dot) => sum + dot.rows.length, 0);
  const marks = backends.map((name, i) => `${MARKS[i % 3]} ${name}`).join(", ");
  return [drawing, p("about", backends.length > 1 ? `Marks: ${marks}. ` : "",
    groups.some((dot) => dot.edge) ? "Small dots on the edge lie outside the plot. " : "",
    rest ? `${plural(rest, "step")} without operations or bytes not shown. ` : "",
    plot.unlabelled.length ? `Ceilings without a label: ${plot.unlabelled.join(", ")}.` : "")];
}

/** Memory bandwidth and peak FLOP/s of a backend; null unless both are known. */
function ceilingsOf(name) {
  const roof = report.ceilings[name] ?? {}, integer = roof.integer_flop_s;
  const flats = [["integer", integer], ["float", roof.float_flop_s]]
    .filter(([, rate], i) => rate && (i === 0 || rate !== integer));
  if (!roof.bytes_s || !flats.length) return null;
  return { name, rate: roof.bytes_s, flats, top: Math.max(...flats.map(([, rate]) => rate)) };
}

/** Scales of the plot: x in operations per byte, y in operations per second. */
function axes(groups, backends, width, height) {
  const xs = groups.map((dot) => dot.flops / dot.bytes);
  const ys = groups.map((dot) => 1e9 * dot.gflops);
  for (const roof of backends.map(ceilingsOf).filter(Boolean)) {
    xs.push((3 * roof.top) / roof.rate);
    ys.push(1.6 * roof.top);
  }
  const low = (values) => Math.log10(Math.min(...values)) - 0.35;
  const high = (values) => Math.log10(Math.max(...values)) + 0.15;
  const x0 = groups.length ? low(xs) : 0, x1 = groups.length ? high(xs) : 1;
  const y0 = groups.length ? low(ys) : 0, y1 = groups.length ? high(ys) : 1;
  const numbers = ticks(y0, y1).map(([exponent, digit]) => plain(exponent - 9, digit));
  const widest = Math.max(0, ...numbers.map((text) => 2 * textBox(text, 0, 0).right));
  const box = {
    left: Math.max(62, 26 + widest), right: width - 12, top: 12, bottom: height - 40,
  };
  const x = (value) => box.left + ((Math.log10(value) - x0) / (x1 - x0)) * (box.right - box.left);
  const y = (value) => box.bottom - ((Math.log10(value) - y0) / (y1 - y0)) * (box.bottom - box.top);
  const labels = new Labels();
  return { box, x0, x1, y0, y1, x, y, width, height, labels, unlabelled: [] };
}

/** Format a tick of a scale. */
const plain = (exponent, digit) => (exponent >= -3 && exponent <= 6
  ? fixed(digit * 10 ** exponent, Math.max(0, -exponent)) : `${digit}e${exponent}`);

/** Grid lines at round numbers, tick labels where they fit, and axis titles. */
function grid({ box, x0, x1, y0, y1, x, y, height, labels }) {
  const tick = (text, at, base) => {
    const room = labels.place([textBox(text, at, base)]);
    return room && svg("text", { x: at, y: base, class: "tick middle" }, text);
  };
  const title = (text, at, base, degrees) => {
    labels.placed.push(textBox(text, at, base, (degrees * Math.PI) / 180));
    const transform = `translate(${at} ${base}) rotate(${degrees})`;
    return svg("text", { transform, class: "axis middle" }, text);
  };
  const upright = ([exponent, digit]) => {
    const at = x(digit * 10 ** exponent);
    return [svg("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "grid" }),
      tick(plain(exponent, digit), at, box.bottom + 15)];
  };
  const level = ([exponent, digit]) => {
    const at = y(digit * 10 ** exponent), text = plain(exponent - 9, digit);
    const { left, right } = textBox(text, 0, 0);
    return [svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "grid" }),
      tick(text, box.left - 6 - (right - left) / 2, at + 3.5)];
  };
  return svg("g", {}, title("operations per byte", (box.left + box.right) / 2, height - 6, 0),
    title("GFLOP/s", 12, (box.top + box.bottom) / 2, -90),
    ticks(x0, x1).map(upright), ticks(y0, y1).map(level));
}

/** Round numbers between two powers of ten, as [exponent, digit]. */
function ticks(from, to) {
  const digits = to - from < 2.5 ? [1, 2, 5] : [1], every = Math.ceil((to - from) / 8);
  const found = [];
  for (let exponent = Math.floor(from); exponent <= to; exponent++) {
    for (const digit of digits) {
      const at = exponent + Math.log10(digit);
      if (at >= from && at <= to && exponent % every === 0) found.push([exponent, digit]);
    }
  }
  return found;
}

/** Ceilings of all backends: memory bandwidth and peak FLOP/s. */
function ceilingLines(plot, backends) {
  const { box, x1, x, y, labels } = plot;
  const known = backends.map(ceilingsOf).filter(Boolean);
  for (const roof of known) {
    roof.before = backends.length > 1 ? `${roof.name}: ` : "";
    roof.slope = slopeOf(plot, roof);
    roof.lines = roof.flats.map(([, rate]) =>
      [Math.max(box.left, x(rate / roof.rate)), y(rate), x(10 ** x1), y(rate)]);
    labels.lines.push(roof.slope, ...roof.lines);
  }
  const line = ([a, b, c, d], dashes) =>
    svg("line", { x1: a, y1: b, x2: c, y2: d, "stroke-dasharray": dashes });
  return known.map((roof) => {
    const dashes = backends.indexOf(roof.name) ? "6 3" : null;
    const flat = ([kind, rate], i) => {
      const [from, level, to] = roof.lines[i], text = `${roof.before}${kind} ${flopRate(rate)}`;
      const spots = [level - 5, level + 13].flatMap((base) => along(from, Math.min(to, box.right),
        (at) => textBox(text, at, base)));
      return placeLabel(plot, text, spots, 0);
    };
    return svg("g", { class: "roof" }, line(roof.slope, dashes),
      roof.lines.map((each) => each[1] <= box.bottom && line(each, dashes)),
      roof.flats.map(flat), slopeLabel(plot, roof));
  });
}

/** Candidate rectangles made by `make`, centred on a line from its right end to its middle. */
function along(from, to, make) {
  const { left, right } = make(0), half = (right - left) / 2;
  const first = to - half, last = Math.min(first, from - half);
  return Array.from({ length: 25 }, (_, i) => make(first + ((last - first) * i) / 24));
}

/** Label of a ceiling at the first free candidate; without one it is listed below the plot. */
function placeLabel({ box, labels, unlabelled }, text, spots, degrees) {
  const room = labels.place(spots.filter((spot) => inside(spot, box)));
  if (!room) {
    unlabelled.push(text);
    return null;
  }
  const transform = `translate(${room.x} ${room.y}) rotate(${degrees})`;
  return svg("text", { transform, class: "middle" }, text);
}

/** The memory ceiling, up to the highest peak FLOP/s. */
function slopeOf({ x0, y0, x, y }, { rate, top }) {
  const from = Math.max(10 ** x0, 10 ** y0 / rate), to = top / rate;
  return [x(from), y(rate * from), x(to), y(top)];
}

/** Label of the memory ceiling, along its line. */
function slopeLabel(plot, { before, rate, slope: [a, b, c, d] }) {
  const text = before + byteRate(rate), angle = Math.atan2(d - b, c - a);
  const spots = [-6, 14].flatMap((away) => Array.from({ length: 19 }, (_, i) => 0.95 - i * 0.05)
    .map((share) => textBox(text, a + (c - a) * share - away * Math.sin(angle),
      b + (d - b) * share + away * Math.cos(angle), angle)));
  const crossed = plot.labels.lines;
  // The bounding box of a rotated text is always crossed by its own line.
  plot.labels.lines = crossed.filter((line) => line[0] !== a || line[1] !== b);
  const found = placeLabel(plot, text, spots, (angle * 180) / Math.PI);
  plot.labels.lines = crossed;
  return found;
}

function dots(phase, groups, backends) {
  return svg("g", {}, groups.map((dot) => {
    const show = (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      const lines = [["backend", dot.backend],
        ["operations per byte", short(dot.flops / dot.bytes)], ...facts(phase, dot)];
      tip.show(dot.key, lines, box.right - box.width / 4, box.top + box.height / 2);
    };
    return mark(MARKS[backends.indexOf(dot.backend) % 3], dot, {
      class: dot.edge ? "dot edge" : "dot", fill: fillOf(dot.op), tabindex: 0, role: "img",
      "aria-label": `${dot.key}: ${phase.perToken(dot.ns)}`,
      onpointerenter: show, onpointerleave: tip.left, onfocus: show, onblur: tip.hide,
    });
  }));
}

/** A mark with the area of a circle of radius r. */
function mark(kind, { cx, cy, r }, attributes) {
  if (kind === "circle") return svg("circle", { cx, cy, r, ...attributes });
  const side = r * Math.sqrt(Math.PI);
  const turn = kind === "diamond" ? `rotate(45 ${cx} ${cy})` : null;
  const corner = { x: cx - side / 2, y: cy - side / 2, width: side, height: side };
  return svg("rect", { ...corner, transform: turn, ...attributes });
}

/** The square around a point. */
const around = (x, y, size) =>
  ({ left: x - size / 2, right: x + size / 2, top: y - size / 2, bottom: y + size / 2 });
const inside = (room, box) => room.left >= box.left && room.right <= box.right &&
  room.top >= box.top && room.bottom <= box.bottom;

const DIRECTIONS = [
  [1, 0], [-1, 0], [0, 1], [0, -1], [0.7, 0.7], [0.7, -0.7], [-0.7, 0.7], [-0.7, -0.7],
];

/** Labels of the largest dots, where they fit; distant labels have a leader line. */
function names({ box, labels }, groups) {
  return svg("g", { class: "names" }, groups.slice(0, 10).map((dot) => {
    const text = clipped(dot.key, 32);
    const { left, right } = textBox(text, 0, 0), half = (right - left) / 2;
    const spots = [5, 24, 44].flatMap((away) => DIRECTIONS.map((direction) => {
      const [to, down] = direction, reach = dot.r + away;
      const x = dot.cx + to * (reach + half), y = dot.cy + down * (reach + 5) + 4;
      return { ...textBox(text, x, y), leader: away > 5 && leader(dot, direction, reach) };
    }));
    const own = labels.place(spots.filter((spot) => inside(spot, box)), true);
    if (!own) return null;
    const [x1, y1, x2, y2] = own.leader || [];
    return [own.leader && svg("line", { class: "leader", x1, y1, x2, y2 }),
      svg("text", { x: own.x, y: own.y, class: "middle" }, text)];
  }));
}

/** Leader line from a dot to its label. */
function leader({ cx, cy, r }, [right, down], reach) {
  const size = Math.hypot(right, down), from = (r + 1) / size;
  return [cx + from * right, cy + from * down, cx + right * (reach - 2), cy + down * (reach - 2)];
}
