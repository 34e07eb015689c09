// What an answer cost, op by op: the field `x_profile` of the server.

const rate = (count, ns) => (count === undefined || !ns ? "" : (count / ns).toFixed(1));

/** A table of the rows of a bill, which add up to the time between the request and the answer's end. */
function billElement(bill) {
  const wall = Math.max(bill.wall_ns, 1);
  const row = ({ name, ns, bytes, flops }) => h("tr", {}, h("th", { scope: "row" }, visible(name)),
    [(ns / 1e6).toFixed(3), `${(100 * ns / wall).toFixed(1)} %`, rate(bytes, ns), rate(flops, ns)]
      .map((text) => h("td", {}, text)));
  const heads = ["op", "ms", "share", "GB/s", "GFLOP/s"].map((name) => h("th", { scope: "col" }, name));
  const total = { name: `all, ${bill.steps} steps, ${bill.tokens} tokens computed`, ns: bill.wall_ns };
  return h("details", { class: "bill" }, h("summary", {}, "Why this speed?"),
    h("div", { class: "wide", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, heads)),
      h("tbody", {}, bill.rows.filter(({ ns }) => ns > 0).map(row)), h("tfoot", {}, row(total)))));
}
