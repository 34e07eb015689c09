// -------------------------------------------------------------------------------------------- main

const SECTIONS = [
  ["roofline", "Roofline"], ["heat", "Layers"], ["table", "Table"], ["requests", "Requests"],
  ["timeline", "Timeline"], ["arena", "Memory"], ["placement", "Placement"],
];

const selection = { phase: phases[phases.length - 1], heat: "time", plan: 0 };
let redraws = []; // functions to call when width or colours change

/** An element whose content is redrawn when its width changes. */
function redrawable(draw) {
  const place = h("div", { class: "drawing" });
  redraws.push(() => {
    const width = place.clientWidth;
    if (width) place.replaceChildren(...[draw(width)].flat(Infinity));
  });
  return place;
}

/** A zoomable drawing and its buttons. */
function zoomable(name, drawing) {
  const zoomableCanvas = new ZoomableCanvas(name, drawing);
  redraws.push(() => zoomableCanvas.redraw());
  return [h("div", { class: "drawing" }, zoomableCanvas.canvas), zoomableCanvas.buttons];
}

/** The run of median length of the selected plan. */
const typical = () => selection.phase.typical.find((run) => run.plan === selection.plan);

/** The plan with the most time in a phase. */
function mainPlan(phase) {
  const spent = (run) => run.runs * run.times.reduce((sum, ns) => sum + ns, 0);
  return phase.typical.reduce((most, run) => (spent(run) > spent(most) ? run : most)).plan;
}

function rooflineSection(phase) {
  return section("roofline", "Roofline", "The distance of an op from the line above it is its " +
    "headroom. Left of the bend it is bound by memory, right of it by arithmetic. Areas are time.",
  null,
  redrawable((width) => roofline(phase, width)));
}

function heatSection(phase) {
  const options = [["time", "time"], ["headroom", "headroom"]];
  const controls = choice("heat-by", "colour", options, selection.heat,
    (by) => { selection.heat = by; redraw(); });
  return section("heat", "Heat map by layer", "Time per token of each kind of op in each layer.",
    phase.limited ? controls : null,
    redrawable((width) => heat(phase, width, phase.limited ? selection.heat : "time")));
}

function headroomSection(phase) {
  if (!phase.limited) return null;
  return section("headroom", "Largest headroom", "Time above the ceiling, by kind of op.",
    null, headroomTable(phase));
}

function tableSection(phase) {
  return section("table", "Steps", "The time of a step is from the end of the step before to its own " +
    "end. Click a row to show its steps, a column to sort by it.", null, table(phase));
}

/** The section of a phase in which several requests took part. */
function requestsSection(phase) {
  if (phase.requests.length < 2) return null;
  return section("requests", "Requests", "What each request costs per pass. Time is divided by the " +
    "work of each request; gaps and host time equally.", null, requestTable(phase));
}

function timelineSection(phase) {
  const run = typical(), [place, buttons] = zoomable("timeline", timeline(phase, run));
  const env = Object.entries(run.env).map(([name, value]) => `${name} = ${value}`).join(", ");
  const options = phase.typical.map((each) => [String(each.plan), `plan ${each.plan}`]);
  const plans = choice("plan", "plan", options, String(run.plan), (plan) => {
    selection.plan = Number(plan);
    render();
    document.querySelector("#plan input:checked").focus();
  });
  return section("timeline", "Timeline of a run",
    `Run ${run.index + 1} of ${run.runs}, with the median duration: ${env}.`,
    h("div", { class: "controls" }, phase.plans > 1 ? plans : null, buttons), place,
    legend(new Set(phase.rows.op.map((text) => texts[text]))));
}

function arenaSection(phase) {
  const own = phase.arena.filter((each) =>
    each.plan === selection.plan && each.spans.offset.length);
  const content = own.map((each) => {
    const name = `arena of ${each.memory}`;
    const [place, buttons] = zoomable(name, new Arena(each, typical().times.length));
    return [h("div", { class: "title" }, p("about", arenaSummary(each)), buttons), place];
  });
  return section("arena", "Memory", "Results and workspaces in the arena, by step (horizontal) and " +
    "offset (vertical).", null, content.length ? content : p("note", "No arena."));
}

function placementSection(phase) {
  return section("placement", "Placement", "Number of steps of each op on each backend.", null,
    placement(phase));
}

/** Choice of phase, and links to the sections. */
function bar() {
  const chose = (name) => {
    selection.phase = phases.find((phase) => phase.name === name);
    selection.plan = mainPlan(selection.phase);
    render();
  };
  const options = phases.map(({ name }) => [name, name]);
  return [
    choice("phase", "phase", options, selection.phase.name, chose),
    h("div", { class: "links" }, SECTIONS
      .filter(([id]) => id !== "requests" || phases.some((phase) => phase.requests.length > 1))
      .map(([id, name]) => h("a", { href: `#${id}` }, name))),
  ];
}

function render() {
  const { phase } = selection, at = scrollY; // the page is short until the drawings are there
  redraws = [];
  tip.hide();
  document.getElementById("main").replaceChildren(
    h("div", { class: "pair" }, rooflineSection(phase),
      h("div", { class: "column" }, heatSection(phase), headroomSection(phase) ?? [])),
    tableSection(phase), requestsSection(phase) ?? [], timelineSection(phase),
    h("div", { class: "pair" }, arenaSection(phase), placementSection(phase)));
  redraw();
  scrollTo({ top: at, behavior: "instant" });
}

function redraw() {
  for (const each of redraws) each();
}

function listen() {
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const kind of ["wheel", "touchmove"]) addEventListener(kind, tip.hide, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hide();
  });
}

function begin() {
  const top = document.getElementById("head");
  top.append(...heading(), busy() ?? "");
  if (!phases.length) {
    top.append(p("note", "Nothing ran."));
    return;
  }
  assignColours();
  top.append(h("div", { class: "cards", id: "summary" }, phases.map(card), start()));
  document.getElementById("bar").append(...bar());
  selection.plan = mainPlan(selection.phase);
  render();
  listen();
}

begin();
