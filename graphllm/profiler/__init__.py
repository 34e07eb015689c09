"""Profiling: what a run costs, op by op, and how far each op is from the machine's ceilings.

How a profile is made, in order:

- `capture` runs prompts, as one batch, with and without profiling;
- `record` takes the time of every step from the backends' logs and adds the bytes and FLOPs that
  the op declares (`graphllm.ops`, `OpDef.node_cost`): one `Row` per step;
- `accounting` splits the wall time into ops, copies, gaps and host time;
- `request_costs` divides these among the requests, by the shares of `step_shares`;
- `ramp_record` runs one more pass on a GPU if asked to, and `ramps` finds from the times of thread
  blocks when each launch kept memory busy;
- `roofline` measures the ceilings of the machine, `phase` compares the rows with them;
- `profile` joins the phases with what was run, on what machine;
- `report`, `ramp_report`, `html` and `trace` show a profile; `compare` and `diff` compare two.

`bill` charges the steps of a serving engine to the requests that ask for a bill. `prediction`,
`batch_prediction` and `load_prediction` estimate times without running; `bench`, `batch_bench`,
`load_test` and `http_load` measure speed only.
"""
