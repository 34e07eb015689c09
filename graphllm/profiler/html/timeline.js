// ---------------------------------------------------------------------------------------- timeline

const LANE = 46, HOST_LANE = 16, AXIS = 22, SPACE = 8, LABEL = 15;

/** A typical run as a drawing: a lane of each backend with its steps, one of the host. */
function timeline(phase, typical) {
  const rows = [];
  for (let row = 0; row < phase.count; row++) {
    if (phase.rows.plan[row] === typical.plan) rows.push(row);
  }
  const steps = [], gaps = [];
  let at = typical.called, before = "";
  for (const segment of typical.segments) {
    const backend = phase.text("backend", rows[segment.first]);
    const name = before ? `${before} to ${backend}` : `launch on ${backend}`;
    if (segment.begin > at) gaps.push({ name, lo: at, hi: segment.begin, backend });
    let end = segment.begin;
    for (let step = segment.first; step < segment.first + segment.count; step++) {
      steps.push({ row: rows[step], lo: end, hi: end + typical.times[step], backend });
      end += typical.times[step];
    }
    [at, before] = [Math.max(at, end), backend];
  }
  if (typical.returned > at) {
    gaps.push({ name: "return", lo: at, hi: typical.returned, backend: before });
  }
  return new Timeline(phase, typical, steps, gaps);
}

class Timeline {
  constructor(phase, typical, steps, gaps) {
    const start = Math.min(typical.called, steps.length ? steps[0].lo : typical.called);
    const lanes = [...new Set(steps.map((step) => step.backend))];
    const top = (backend) => HOST_LANE + SPACE + LABEL + lanes.indexOf(backend) * (LANE + SPACE + LABEL);
    for (const item of [...steps, ...gaps]) {
      Object.assign(item, { lo: item.lo - start, hi: item.hi - start, top: top(item.backend) });
      item.bottom = item.top + LANE;
    }
    const end = Math.max(typical.returned - start, ...steps.slice(-1).map((step) => step.hi));
    Object.assign(this, { phase, steps, gaps, lanes, top });
    this.own = lanes.map((backend) => steps.filter((step) => step.backend === backend));
    this.host = { lo: typical.called - start, hi: typical.returned - start };
    this.length = Math.max(1, end);
    this.height = top(lanes[0]) + lanes.length * (LANE + SPACE + LABEL) - LABEL + AXIS;
  }

  draw(context, view, width, palette) {
    const px = (x) => ((x - view.lo) / (view.hi - view.lo)) * width;
    context.font = `11px ${palette.font}`;
    context.textBaseline = "middle";
    context.fillStyle = palette.host;
    const from = Math.max(0, px(this.host.lo)), to = Math.min(width, px(this.host.hi));
    context.fillRect(from, 0, Math.max(1, to - from), HOST_LANE);
    context.fillStyle = palette.paper;
    if (to - from > 150) context.fillText("host: called to returned", from + 6, HOST_LANE / 2 + 0.5);
    this.lanes.forEach((backend, i) => {
      const top = this.top(backend);
      context.fillStyle = palette.soft;
      context.fillText(backend, 0, top - LABEL / 2);
      context.fillStyle = palette.lane;
      context.fillRect(0, top, width, LANE);
      this.lane(context, this.own[i], px, width, palette);
    });
    ruler(context, view, width, this.height - AXIS, palette, time);
  }

  /** The steps of one lane; of those that share a pixel, the longest. */
  lane(context, steps, px, width, palette) {
    let drawn = -1, longest = 0;
    for (const step of steps.slice(first(steps, px))) {
      const from = px(step.lo), to = px(step.hi);
      if (from > width) break;
      const thin = to - from < 1, pixel = Math.floor(from);
      if (thin && pixel === drawn && step.hi - step.lo < longest) continue;
      [drawn, longest] = [pixel, step.hi - step.lo];
      context.fillStyle = palette.ops[hue(this.phase.text("op", step.row))];
      const size = thin ? 1 : Math.max(0.6, to - from - (to - from > 4 ? 1 : 0));
      context.fillRect(thin ? pixel : from, step.top, size, LANE);
      if (size > 60) this.name(context, step, Math.max(0, from), Math.min(width, to), palette);
    }
  }

  name(context, step, from, to, palette) {
    const room = (to - from - 10) / 6.1;
    if (room < 5) return;
    const { phase } = this;
    context.fillStyle = palette.on[hue(phase.text("op", step.row))];
    context.fillText(clipped(phase.kind(step.row), room), from + 5, step.top + 16);
    context.fillText(clipped(time(step.hi - step.lo), room), from + 5, step.top + 31);
  }

  at(x, y) {
    const lane = this.lanes.findIndex((backend) =>
      y >= this.top(backend) && y < this.top(backend) + LANE);
    if (lane < 0) return null;
    const inside = (item) => item.lo <= x && x < item.hi;
    return this.own[lane].find(inside) || this.gaps.find((gap) => inside(gap)) || null;
  }

  beside(item, by) {
    return this.steps[item ? this.steps.indexOf(item) + by : 0] || null;
  }

  tell(item) {
    const took = ["time", time(item.hi - item.lo)], from = ["from", time(item.lo)];
    if (item.name) return [`gap: ${item.name}`, [took, from]];
    const { phase } = this, { row } = item, { rows } = phase;
    const ns = item.hi - item.lo, calls = rows.calls[row];
    const limit = rows.limit[row] === null || !ns ? "" :
      `${percent(rows.limit[row] / calls / ns)}, bound by ${phase.text("bound", row)}`;
    return [phase.kind(row), [
      ["scope", phase.text("scope", row)], ["step", String(rows.step[row])], took, from,
      ["median", time(rows.median[row])],
      ["memory", rows.bytes[row] && ns ? byteRate((1e9 * rows.bytes[row]) / calls / ns) : ""],
      ["arithmetic", rows.flops[row] && ns ? flopRate((1e9 * rows.flops[row]) / calls / ns) : ""],
      ["of the limit", limit], ["kernel", `${item.backend}: ${phase.text("kernel", row)}`],
      ["shapes", phase.text("shape", row)],
    ]];
  }
}

/** The first step that ends right of the left edge. */
function first(steps, px) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (px(steps[middle].hi) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Round numbers below a drawing. */
function ruler(context, view, width, y, palette, write) {
  const rough = (view.hi - view.lo) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  context.textBaseline = "alphabetic";
  for (let x = Math.ceil(view.lo / step) * step; x <= view.hi; x += step) {
    const at = ((x - view.lo) / (view.hi - view.lo)) * width;
    const text = write(x), wide = context.measureText(text).width;
    context.fillStyle = palette.line;
    context.fillRect(Math.round(at), y - 2, 1, 6);
    context.fillStyle = palette.soft;
    context.fillText(text, Math.max(0, Math.min(at - wide / 2, width - wide)), y + 16);
  }
}
