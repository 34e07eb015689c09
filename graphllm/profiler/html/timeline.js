// ---------------------------------------------------------------------------------------- timeline

const LANE = 46, HOST_LANE = 16, AXIS = 22, SPACE = 8, LABEL = 15;

/** Drawing of the run of median duration. */
function timeline(phase, run) {
  const rows = [...phase.rows.plan.keys()].filter((row) => phase.rows.plan[row] === run.plan);
  const steps = [], gaps = [];
  let at = run.called, before = "";
  for (const { first, count, begin } of run.segments) {
    const backend = phase.text("backend", rows[first]);
    const name = before ? `${before} to ${backend}` : `launch on ${backend}`;
    if (begin > at) gaps.push({ name, lo: at, hi: begin, backend });
    let end = begin;
    for (let step = first; step < first + count; step++) {
      steps.push({ row: rows[step], lo: end, hi: end += run.times[step], backend });
    }
    at = Math.max(at, end);
    before = backend;
  }
  if (run.returned > at) gaps.push({ name: "return", lo: at, hi: run.returned, backend: before });
  return new Timeline(phase, run, steps, gaps);
}

/** A lane of the host, and a lane per backend with its steps. */
class Timeline {
  constructor(phase, run, steps, gaps) {
    const start = Math.min(run.called, steps[0].lo);
    this.lanes = [...new Set(steps.map((step) => step.backend))].map((backend, i) => ({
      backend, top: HOST_LANE + (i + 1) * (SPACE + LABEL) + i * LANE,
      steps: steps.filter((step) => step.backend === backend),
    }));
    const tops = new Map(this.lanes.map(({ backend, top }) => [backend, top]));
    for (const item of [...steps, ...gaps]) {
      item.lo -= start;
      item.hi -= start;
      item.top = tops.get(item.backend);
      item.bottom = item.top + LANE;
    }
    Object.assign(this, { phase, steps, gaps });
    this.host = { lo: run.called - start, hi: run.returned - start };
    this.length = Math.max(1, this.host.hi, steps[steps.length - 1].hi);
    this.height = this.lanes[this.lanes.length - 1].top + LANE + AXIS;
  }

  draw(context, view, width, palette) {
    const px = (x) => ((x - view.lo) / (view.hi - view.lo)) * width;
    const from = Math.max(0, px(this.host.lo)), to = Math.min(width, px(this.host.hi));
    context.textBaseline = "middle";
    context.fillStyle = palette.host;
    context.fillRect(from, 0, Math.max(1, to - from), HOST_LANE);
    context.fillStyle = palette.paper;
    if (to - from > 150) context.fillText("host: call to return", from + 6, HOST_LANE / 2);
    for (const lane of this.lanes) {
      context.fillStyle = palette.soft;
      context.fillText(lane.backend, 0, lane.top - LABEL / 2);
      context.fillStyle = palette.lane;
      context.fillRect(0, lane.top, width, LANE);
      this.lane(context, lane.steps, px, width, palette);
    }
    ruler(context, view, width, this.height - AXIS, palette, time);
  }

  /** Draw the steps of one lane; of steps within one pixel only the longest. */
  lane(context, steps, px, width, palette) {
    let drawn = -1, longest = 0;
    for (let i = firstSeen(steps, px); i < steps.length && px(steps[i].lo) <= width; i++) {
      const { row, lo, hi, top } = steps[i], from = px(lo), wide = px(hi) - from;
      const thin = wide < 1, pixel = Math.floor(from);
      if (thin && pixel === drawn && hi - lo < longest) continue;
      [drawn, longest] = [pixel, hi - lo];
      context.fillStyle = palette.ops[hue(this.phase.text("op", row))];
      context.fillRect(thin ? pixel : from, top, thin ? 1 : wide - (wide > 4 ? 1 : 0), LANE);
      if (wide > 40) {
        this.name(context, steps[i], Math.max(0, from), Math.min(width, from + wide), palette);
      }
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
    const lane = this.lanes.find(({ top }) => top <= y && y < top + LANE);
    const inside = (item) => item.lo <= x && x < item.hi;
    return (lane && (lane.steps.find(inside) || this.gaps.find(inside))) || null;
  }

  neighbour(item, by) {
    return this.steps[item ? this.steps.indexOf(item) + by : 0] || null;
  }

  describe(item) {
    const { phase } = this, { row } = item, ns = item.hi - item.lo;
    const times = [["time", time(ns)], ["from", time(item.lo)]];
    if (item.name) return [`gap: ${item.name}`, times];
    const { calls, bytes: moved, flops, limit, median } = phase.rows;
    const rate = (sum) => (ns ? (1e9 * sum[row]) / calls[row] / ns : 0);
    const share = ns && limit[row] !== null ? limit[row] / calls[row] / ns : 0;
    return [phase.kind(row), [
      ["scope", phase.text("scope", row)], ["step", phase.step(row)], ...times,
      ["median", time(median[row])], ["memory", rate(moved) && byteRate(rate(moved))],
      ["arithmetic", rate(flops) && flopRate(rate(flops))],
      ["of roofline", share && `${percent(share)}, bound by ${phase.text("bound", row)}`],
      ["kernel", `${item.backend}: ${phase.text("kernel", row)}`],
      ["shapes", phase.text("shape", row)],
    ]];
  }
}

/** Index of the first step that ends right of the left edge. */
function firstSeen(steps, px) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (px(steps[middle].hi) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Ticks at round numbers below a drawing. */
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
