// ---------------------------------------------------------------------------------------- roofline

const LARGE = 0.01; // share of the wall time from which on a dot widens the plot
const MARKS = ["circle", "square", "diamond"]; // of backends, in the order in which they are asked

/** Operations per byte against operations a second, both in powers of ten; time is area. */
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
  const { left, right, top, bottom } = plot.box;
  for (const dot of groups) {
    const x = plot.x(dot.flops / dot.bytes), y = plot.y(1e9 * dot.gflops);
    dot.cx = Math.max(left, Math.min(x, right));
    dot.cy = Math.max(top, Math.min(y, bottom));
    dot.edge = dot.cx !== x || dot.cy !== y;
    dot.r = Math.max(3.5, Math.min(30, width / 16) * Math.sqrt(dot.ns / phase.wall));
  }
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, class: "roofline", role: "group",
    "aria-label": "roofline plot",
  }, grid(plot), roofs(plot, groups, backends),
    dots(phase, groups, backends), names(plot, large));
  const rest = phase.count - groups.reduce((sum, dot) => sum + dot.rows.length, 0);
  const marks = backends.map((name, i) => `${MARKS[i % 3]} ${name}`).join(", ");
  return [drawing, p("about", backends.length > 1 ? `Marks: ${marks}. ` : "",
    groups.some((dot) => dot.edge) ? "Small dots on the edge lie beyond it. " : "",
    rest ? `${plural(rest, "step")} without operations or bytes not shown.` : "")];
}

/** What a backend's memory gives, and its kinds of arithmetic; null where not both are known. */
function roofOf(name) {
  const roof = report.ceilings[name] ?? {}, integer = roof.integer_flop_s;
  const flats = [["integer", integer], ["float", roof.float_flop_s]]
    .filter(([, rate], i) => rate && (i === 0 || rate !== integer));
  if (!roof.bytes_s || !flats.length) return null;
  return { name, rate: roof.bytes_s, flats, top: Math.max(...flats.map(([, rate]) => rate)) };
}

/** Where what is drawn: x in operations per byte, y in operations a second. */
function axes(groups, backends, width, height) {
  const xs = groups.map((dot) => dot.flops / dot.bytes);
  const ys = groups.map((dot) => 1e9 * dot.gflops);
  for (const roof of backends.map(roofOf).filter(Boolean)) {
    xs.push((3 * roof.top) / roof.rate);
    ys.push(1.6 * roof.top);
  }
  const low = (values) => Math.log10(Math.min(...values)) - 0.35;
  const high = (values) => Math.log10(Math.max(...values)) + 0.15;
  const box = { left: 62, right: width - 12, top: 12, bottom: height - 40 };
  const x0 = groups.length ? low(xs) : 0, x1 = groups.length ? high(xs) : 1;
  const y0 = groups.length ? low(ys) : 0, y1 = groups.length ? high(ys) : 1;
  const x = (value) => box.left + ((Math.log10(value) - x0) / (x1 - x0)) * (box.right - box.left);
  const y = (value) => box.bottom - ((Math.log10(value) - y0) / (y1 - y0)) * (box.bottom - box.top);
  return { box, x0, x1, y0, y1, x, y, width, height, taken: [] };
}

function grid({ box, x0, x1, y0, y1, x, y, width, height }) {
  const plain = (exponent, digit) => (exponent >= -3 && exponent <= 6
    ? fixed(digit * 10 ** exponent, Math.max(0, -exponent)) : `${digit}e${exponent}`);
  const upright = ([exponent, digit]) => {
    const at = x(digit * 10 ** exponent);
    return [svg("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "grid" }),
      svg("text", { x: at, y: box.bottom + 15, class: "tick middle" }, plain(exponent, digit))];
  };
  const level = ([exponent, digit]) => {
    const at = y(digit * 10 ** exponent);
    return [svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "grid" }),
      svg("text", { x: box.left - 7, y: at + 3.5, class: "tick end" }, plain(exponent - 9, digit))];
  };
  return svg("g", {}, ticks(x0, x1).map(upright), ticks(y0, y1).map(level),
    svg("text", { x: (box.left + box.right) / 2, y: height - 6, class: "axis middle" },
      "operations per byte"),
    svg("text", {
      transform: `translate(12 ${(box.top + box.bottom) / 2}) rotate(-90)`, class: "axis middle",
    }, "GFLOP/s"));
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

/** What the memories give, and under what the arithmetic ends. */
function roofs(plot, groups, backends) {
  const { box, x1, x, y, taken } = plot;
  const known = backends.map(roofOf).filter(Boolean).map((roof) => {
    const several = backends.length > 1 ? `${roof.name}: ` : "";
    const flats = roof.flats.map(([kind, rate]) =>
      ({ rate, text: `${several}${kind} ${flopRate(rate)}` }));
    return { ...roof, several, flats };
  });
  taken.push(...groups.map(roomOf));
  for (const roof of known) {
    for (const flat of roof.flats) {
      const wide = flat.text.length * 6, bend = x(flat.rate / roof.rate);
      const spots = [box.right - wide / 2, bend + 8 + wide / 2, (bend + box.right) / 2]
        .map((middle) => around(middle, y(flat.rate) - 8, wide, 14));
      flat.room = spots.find((room) => free(room, taken)) ?? spots[0];
      taken.push(flat.room);
    }
  }
  return known.map((roof) => {
    const dashes = backends.indexOf(roof.name) ? "6 3" : null;
    const flat = ({ rate, text, room }) => [
      svg("line", {
        x1: x(rate / roof.rate), y1: y(rate), x2: x(10 ** x1), y2: y(rate),
        "stroke-dasharray": dashes,
      }),
      svg("text", { x: (room.left + room.right) / 2, y: y(rate) - 5, class: "middle" }, text),
    ];
    return svg("g", { class: "roof" }, slope(plot, roof, dashes), roof.flats.map(flat));
  });
}

/** The line of the memory up to the highest arithmetic, with its name where there is room. */
function slope({ x0, y0, x, y, taken }, { several, rate, top }, dashes) {
  const from = Math.max(10 ** x0, 10 ** y0 / rate), to = top / rate;
  const text = `${several}${byteRate(rate)}`, wide = text.length * 6;
  const angle = Math.atan2(y(rate * to) - y(rate * from), x(to) - x(from));
  const spots = [0.85, 0.7, 0.55, 0.4, 0.25].map((share) => from ** (1 - share) * to ** share)
    .map((at) => ({
      at, room: around(x(at) - 4, y(rate * at) - 6,
        wide * Math.cos(angle) + 4, wide * Math.sin(-angle) + 12),
    }));
  const own = spots.find(({ room }) => free(room, taken));
  if (own) taken.push(own.room);
  const degrees = (angle * 180) / Math.PI;
  return [
    svg("line", {
      x1: x(from), y1: y(rate * from), x2: x(to), y2: y(top), "stroke-dasharray": dashes,
    }),
    own && svg("text", {
      class: "middle",
      transform: `translate(${x(own.at)} ${y(rate * own.at) - 6}) rotate(${degrees})`,
    }, text),
  ];
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

/** A mark of the area of a circle of radius r. */
function mark(kind, { cx, cy, r }, attributes) {
  if (kind === "circle") return svg("circle", { cx, cy, r, ...attributes });
  const side = r * Math.sqrt(Math.PI);
  const turn = kind === "diamond" ? `rotate(45 ${cx} ${cy})` : null;
  const corner = { x: cx - side / 2, y: cy - side / 2, width: side, height: side };
  return svg("rect", { ...corner, transform: turn, ...attributes });
}

/** The room that a text takes, or a dot; and whether it is apart from all others. */
const around = (x, y, wide, tall) =>
  ({ left: x - wide / 2, right: x + wide / 2, top: y - tall / 2, bottom: y + tall / 2 });
const roomOf = ({ cx, cy, r }) => around(cx, cy, 2 * r - 2, 2 * r - 2);
const free = (box, taken) => taken.every((other) => box.right < other.left ||
  other.right < box.left || box.bottom < other.top || other.bottom < box.top);

const DIRECTIONS = [
  [1, 0], [-1, 0], [0, 1], [0, -1], [0.7, 0.7], [0.7, -0.7], [-0.7, 0.7], [-0.7, -0.7],
];

/** Names of the largest dots, where there is room for them. */
function names({ box, taken }, groups) {
  return svg("g", { class: "names" }, groups.slice(0, 10).map((dot) => {
    const wide = dot.key.length * 6 + 2;
    const spots = [5, 24, 44].flatMap((away) => DIRECTIONS.map(([right, down]) => {
      const reach = dot.r + away, far = away > 5 && [right, down];
      const x = dot.cx + right * (reach + wide / 2), y = dot.cy + down * (reach + 5);
      return { ...around(x, y, wide, 13), far, reach };
    }));
    const own = spots.find((spot) => spot.left >= box.left && spot.right <= box.right &&
      spot.top >= box.top && spot.bottom <= box.bottom && free(spot, taken));
    if (!own) return null;
    taken.push(own);
    const name = svg("text", { x: own.left + 1, y: own.bottom - 3 }, dot.key);
    return [own.far && leader(dot, own), name];
  }));
}

/** From a dot to its name, if that is not beside it. */
function leader({ cx, cy, r }, { far: [right, down], reach }) {
  const size = Math.hypot(right, down), at = (length, unit) => (length * unit) / size;
  return svg("line", {
    class: "leader", x1: cx + at(r + 1, right), y1: cy + at(r + 1, down),
    x2: cx + right * (reach - 2), y2: cy + down * (reach - 2),
  });
}
