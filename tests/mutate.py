"""Mutants of product code, and what runs a test suite against them: which faults does it find?

    python -m tests.mutate [--names A B …] [--jobs 1] [--jobs 2] [--out FILE] [--dry]

For each mutant the tree is copied and changed; then one pytest runs the files that import what
changed, the closest first, until a test fails. What FILE has already is not run again.
"""

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    name: str
    path: str
    why: str  # what is wrong then
    old: str
    new: str

    def changed(self, root: Path) -> str:
        """Return the file with the fault; refuse one that has changed since."""
        text = (root / self.path).read_text()
        if (count := text.count(self.old)) != 1:
            raise SystemExit(f"{self.name}: {self.path} has its old text {count} times, not once.")
        return text.replace(self.old, self.new)


# -- which tests reach a file ----------------------------------------------------------------------

LINKS = ("models", "parallel", "pallas_kernels")  # hfjax/ has a link to each
WHOLE = re.compile(r'"-m", "hfjax"|-m hfjax|walk_packages|import_module\(')  # all is reached
NAMES = re.compile(r"((?:hfjax|tests|benchmarks|docs|examples)(?:\.\w+)+)|\b(\w+)\.py\b")
FROM = re.compile(r"from (hfjax[\w.]*) import \(?([\w, ]+)")


class Imports:
    """Who imports what, of all files; of a package one imports the modules of what one names."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.paths = {module_of(path): path for path in files if path.endswith(".py")}
        self.texts = {name: (root / path).read_text() for name, path in self.paths.items()}
        trees = {name: ast.parse(text) for name, text in self.texts.items()}
        inits = (n for n, path in self.paths.items() if path.endswith("__init__.py"))
        self.served = {name: dict(imported(trees[name])) for name in inits}
        for stub in (path for path in files if path.endswith("__init__.pyi")):
            names = imported(ast.parse((root / stub).read_text()))
            self.served[module_of(stub.removesuffix("i"))] |= dict(names)
        self.users: dict[str | None, set[str]] = {}
        for name, tree in trees.items():
            if not self.paths[name].endswith("__init__.py"):
                self._note(name, used(tree))
                by_words = not name.startswith("hfjax") or name == "hfjax.__main__"
                self._note(name, told(tree) if by_words else ())
            if name.startswith("hfjax.") and ">>> " in self.texts[name]:
                self._note(f"doctests {name}", [name, *told(tree, ">>> ")])

    def _note(self, user: str, names: Iterable[str]) -> None:
        for name in names:
            self.users.setdefault(self.resolved(name), set()).add(user)

    def resolved(self, name: str) -> str | None:
        """Return the module where something is, by all of its name."""
        module, rest = name, list[str]()
        while module and module not in self.paths:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        if rest and (there := self.served.get(module, {}).get(rest[0])):
            return self.resolved(".".join([there, *rest[1:]]))
        return module or None

    def tests_of(self, path: str) -> list[str]:
        """Return the files whose tests, or doctests, reach a file: the closest first."""
        whole = {n for n, t in self.texts.items() if n.startswith("tests") and WHOLE.search(t)}
        far: dict[str, int] = {}
        for begin, names in ((0, {module_of(path)}), (100, whole)):  # so many imports apart
            far |= dict.fromkeys(names - far.keys(), begin)
            for name in (now := list(names)):  # grows
                new = self.users.get(name, set()) - far.keys()
                far |= dict.fromkeys(new, far[name] + 1)
                now += new
        found = [(d, name.removeprefix("doctests ")) for name, d in far.items() if is_test(name)]
        found.sort(key=lambda pair: (pair[0], len(self.texts[pair[1]]), pair[1]))
        return ["hfjax/" * self.paths[n].startswith(LINKS) + self.paths[n] for _, n in found]


def module_of(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["hfjax"] * (parts[0] in LINKS) + parts)


def is_test(name: str) -> bool:
    return name.startswith("doctests ") or name.rpartition(".")[2].startswith("test_")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield how a program calls what it imports, and all of its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = lambda x: x.name if x.asname else x.name.partition(".")[0]
            yield from ((x.asname or whole(x), whole(x)) for x in node.names)
            yield from ((x.name, x.name) for x in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((x.asname or x.name, f"{node.module}.{x.name}") for x in node.names)


def used(tree: ast.AST) -> Iterator[str]:
    """Yield what a program imports, and attributes of it, by all of their names."""
    names = dict(imported(tree))
    yield from names.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, *rest = ast.unparse(node).split(".")
            if head in names:
                yield ".".join([names[head], *rest])


def told(tree: ast.AST, within: str = "") -> Iterator[str]:
    """Yield what texts in a program name: other programs, doctests, places to patch."""
    texts = (x.value for x in ast.walk(tree) if isinstance(x, ast.Constant))
    for text in (x for x in texts if isinstance(x, str) and within in x):
        yield from (name or f"tests.{stem}" for name, stem in NAMES.findall(text))
        yield from (f"{a}.{b.strip()}" for a, names in FROM.findall(text) for b in names.split(","))


# -- running them ----------------------------------------------------------------------------------

FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
CRASHED = re.compile(r'File ".*?/(tests/test_\w+\.py)", line \d+ in (test_\w+)')
RUNNING: set[subprocess.Popen] = set()


def run(given: argparse.Namespace, files: list[str], imports: Imports, mutant: Mutant) -> dict:
    """Return by which test a mutant is found, or that it is not."""
    began, tests = time.monotonic(), imports.tests_of(mutant.path)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *shlex.split(given.select)]
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        for path in files:
            (there := Path(folder, path)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(given.repository / path, there, follow_symlinks=False)
        Path(folder, mutant.path).write_text(mutant.changed(given.repository))
        pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        where: dict = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": folder}}
        command = [sys.executable, "-m", "pytest", *options, *tests]
        RUNNING.add(child := subprocess.Popen(command, start_new_session=True, **where, **pipes))
        try:
            said, _ = child.communicate(timeout=given.timeout)
            ended = f"exit {child.returncode}" if child.returncode else "all pass"
        except subprocess.TimeoutExpired:
            stop(child)
            said, ended = "", "timeout"
    found = FAILED.search(said) or CRASHED.search(said)
    result = {"found": found and "::".join(found.groups()), "ended": ended, "files": len(tests)}
    return result | {"seconds": round(time.monotonic() - began)}


def stop(child: subprocess.Popen) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    every = [mutant.name for mutant in MUTANTS]
    option("--names", nargs="+", default=every, metavar="NAME", help="of mutants (default: all)")
    option("--jobs", type=int, default=1)
    option("--repository", type=Path, default=Path(__file__).resolve().parents[1])
    option("--select", default="", help="arguments of pytest besides")
    option("--timeout", type=float, default=1500, help="seconds for a mutant (default: 1500)")
    option("--out", type=Path, help="JSON file of results, to go on with")
    option("--dry", action="store_true", help="only tell which files would run first")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if unknown := {*given.names} - {*every}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    results = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    mutants = [m for m in MUTANTS if m.name in {*given.names} - results.keys()]
    for mutant in mutants:
        mutant.changed(given.repository)
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=given.repository, text=True)
    files = [x for x in listed.split("\0") if x and os.path.lexists(given.repository / x)]
    imports = Imports(given.repository, files)
    while given.dry and mutants:
        print((first := mutants.pop(0)).name, *imports.tests_of(first.path)[:5])
    pool = ThreadPoolExecutor(given.jobs)
    try:
        runs = {pool.submit(run, given, files, imports, m): m.name for m in mutants}
        for done in as_completed(runs):
            result = results[runs[done]] = done.result()
            found = result["found"] or f"NOT FOUND ({result['ended']})"
            print(f"{runs[done]}: {found}, {result['seconds']} s", flush=True)
            if given.out:
                given.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in RUNNING:
            stop(child)


# -- the mutants: name, file and fault; {{what is there ~> what is there then}} --------------------

CHANGE = re.compile(r"(.*?)\{\{(.*?) ~> (.*?)\}\}(.*)")

TABLE = """
gradients_not_summed parallel/engine/reduce_gradients.py: what is left after the last microbatch is not summed
  summed |= {{lax.psum(group, axes) if axes else  ~> }}group
scatters_in_the_other_order parallel/engine/reduce_gradients.py: of two axes a device gets another one's shard
  for dim, axes in dims for axis in {{axes ~> reversed(axes)}})
same_keys_in_every_step parallel/engine/example_keys.py: the number of the step is not folded in
  {{fold_number(key, step) ~> key}}, first_example if key_index is None else key_index
same_row_keys_in_every_microbatch parallel/engine/example_keys.py: rows counted from the first one's
  else device * local_batch_size{{ + number * batch_size ~> }}
statistics_not_averaged parallel/engine/step_context.py: each device keeps its own running average
  return {{lax.pmean(wide, axes) ~> wide}}.astype(x.dtype)
sums_in_bfloat16 parallel/engine/step_context.py: gradients accumulate in the parameter's dtype
  spec.shard_shape("gradient"), {{jnp.promote_types(spec.dtype, jnp.float32) ~> spec.dtype}}
weight_of_one_microbatch parallel/engine/gradient_engine.py: weights are averaged, not added
  mean = jax.tree.map(lambda x: x.{{sum ~> mean}}(0), means)
outputs_stay_dealt parallel/engine/gradient_engine.py: outputs are not in the order of the batch
  outputs = jax.tree.map({{partial(redistribute, inverse=True) ~> redistribute}}, out.outputs)
gathers_before_the_cast parallel/engine/comm_plan.py: a parameter is sent in the dtype that is stored
  return lax.all_gather(x{{.astype(gather_dtype) ~> }}, collective.axes, axis=dim, tiled=True)
variable_changes_its_dtype parallel/spmd/global_batch.py: what a model writes may be of another dtype
  if {{(shape, dtype) != (old_shape, old_dtype) ~> shape != old_shape}}:
average_not_divided parallel/spmd/placements.py: of what runs on own rows the sum is returned
  return (lax.psum(widen(x), self.axes){{ / self.size ~> }}).astype(x.dtype)
blocks_follow_too_closely parallel/spmd/placements.py: a dimension's second block is misnumbered
  block_starts = lax.iota(dtype, blocks) * {{(size // blocks) ~> chunk_size}}
reversed_cumsum_begins_wrong parallel/spmd/rules/reductions.py: it begins with what lies before it
  before = {{later if is_reverse else  ~> }}device_chunks[None] < local_chunks[:, None, None]
argmax_among_own_rows parallel/spmd/rules/reductions.py: the number is that among the rows here
  group.all_gather_stack({{global_indices[local_index] ~> local_index}}),
scatter_adds_to_each parallel/spmd/rules/indexing.py: what is added to counts once for each device
  [ctx.{{as_partial ~> whole}}(x), *operands]
rows_are_not_dealt parallel/spmd/microbatches.py: microbatches are not those of one device
  number {{% devices ~> // num_microbatches}},
concatenated_blocks_counted parallel/spmd/rules/views.py: parts of several blocks count as one each
  return ctx.bind_sharded(Split(dim, {{sum(sizes) // block ~> len(sizes)}}), equation, operands)
rule_is_not_told parallel/spmd/rules/custom_derivatives.py: a derivative that is not linear sees no weight
  {{inner.record("rule", jnp.zeros(())) ~> pass}}
square_counts_as_linear parallel/jaxprs/linearity.py: a product of two cotangents
  if name in PRODUCTS and operands.count(LINEAR) {{== ~> >=}} 1 and OTHER not in operand_set:
residuals_of_b_and_w_swapped parallel/jaxprs/split_backward.py: those that W needs too come first
  b_inputs = [*known, *(stash[i] for i in (*{{b_ids, *w_ids ~> w_ids, *b_ids}})), *dy]
variables_of_the_first_layer parallel/jaxprs/layer_barriers.py: all layers drop what the first one drops
  known = full_params, variables[{{i ~> 0}}]
cotangent_not_divided parallel/jaxprs/stage_fns.py: gradients are multiplied by the weight later
  return jnp.asarray(seed, loss_sum.dtype){{ / jnp.asarray(divisor, loss_sum.dtype) ~> }}
keys_while_evaluating parallel/whole_model/model.py: forward draws though it does not train
  key = lambda name: variables[key_path(name)]{{ if training else None ~> }}
slices_split_gradients parallel/whole_model/unshard_on_use.py: a scan slices what its gradient is split by
  return all(collective.dim != -ndim for collective in {{(*plan.gathers, *plan.scatters) ~> plan.gathers}})
own_losses_not_averaged parallel/layerwise/layer_update.py: the gradient of a layer is a sum of means
  gradients = {{average_gradients(summed, self.num_local_losses) ~> summed}}
norm_of_own_shards parallel/layerwise/layer_update.py: squares of gradients are not added over devices
  sums = {{lax.psum(jnp.stack([*group.values()]), axes) ~> jnp.stack([*group.values()])}}
piece_by_the_first_axis parallel/layerwise/layer_update.py: of two axes only one says which piece it is
  start = lax.axis_index(axes{{ ~> [:1]}}) * length
fetches_the_same_layer_again parallel/layerwise/passes.py: backward runs with the layer behind
  upcoming = self.host_params(carry, jnp.maximum(i{{ - 1 ~> }}, 0))
skipped_layer_is_updated parallel/layerwise/layer_update.py: on_nonfinite="skip" keeps no layer as it is
  after = guard({{self.on_nonfinite ~> "apply"}}, finite, after, before)
parts_of_rows_share_keys parallel/layer_stack/batch_split.py: both parts of the rows drop the same
  return {{jax.random.fold_in(value, number) ~> value}}
sums_over_a_part_of_the_rows parallel/layer_stack/batch_split.py: layers that add rows pass
  alone.component_comms[name] if event.action {{!= "draw" ~> not in ("draw", "sum")}}]
chunks_count_their_own_examples parallel/layer_stack/batch_split.py: a layer divides by a chunk's
  group = replace(group, size=group.size{{ * count ~> }})
group_of_one_layer parallel/layer_stack/run_layers.py: a group runs its first layer several times
  functions = [one(number, {{number ~> 0}}) for number in range(size)]
last_group_begins_early parallel/layer_stack/run_layers.py: the layers left over are not the last
  _slice_units(arrays, units{{ * size ~> }}, 1, rest)
writes_of_layers_lost parallel/layer_stack/model.py: what layers write is not handed on
  variables = variables{{ | context.template.model_variables(model) ~> }}
embedding_not_weighed parallel/pipeline/executor.py: its gradient stays that of the mean
  return _add_gradients(outside, pull_back(dx), {{self.model.divisor(m) ~> 1.0}})
idle_slots_add_gradients parallel/pipeline/executor.py: what a stage computes while it idles counts
  is_real = None{{ if self._cond or tick.facts.always_runs(kind) else tick.is_active(kind) ~> }}
w_reads_the_slot_of_b parallel/pipeline/executor.py: the weights of another microbatch
  self._read_stash(state, name, unit, tick, "{{W ~> B}}")
chunks_and_units_swapped parallel/pipeline/stash_buffers.py: the parameters of another layer
  pick = lambda a, i: split(a)[{{:, i ~> i}}] if self.slots > 1 else a[i]
sums_the_wrong_chunks parallel/pipeline/overlapped_grad_reduce.py: that in the last tick twice, another one never
  for hop in range({{1, chunks.slots ~> chunks.slots - 1}}):
last_but_one_was_kept parallel/pipeline/activation_checkpointing.py: backward takes what another microbatch kept
  tick["B_microbatch"] == self.last_microbatch{{ ~>  - 1}}
keys_of_the_first_part parallel/pipeline/engine.py: accumulated parts of a batch drop the same
  **keys(layer, {{number * count +  ~> }}m, batch_size),
first_by_the_forward_slot parallel/pipeline/tick.py: embedding has no gradient while pipes drain
  runs["first_backward"] = runs["B"] & (g[..., {{1 ~> 0}}] == 0)
rounds_too_short parallel/schedules/builders.py: stages wait for the next chunk
  rounds = max(1, {{microbatches // stages ~> -(-microbatches // stages)}})
one_forward_more_ahead parallel/schedules/builders.py: a stage keeps one microbatch more
  ahead = stages - {{1 -  ~> }}stage
w_has_no_slot parallel/schedules/compile.py: late residuals are read from slot 0
  (("B_w_residuals", backward_tick),{{ ("W_w_residuals", tick) ~> }}),
updates_at_the_first parallel/schedules/versions.py: a group ends with its first microbatch
  updates = (backward >= 0) & (backward % every == {{every - 1 ~> 0}})
message_in_no_time parallel/schedules/check_table.py: a table may read what is sent in the same tick
  if times[need] > tick{{ - wait ~> }}:
weights_counted_twice parallel/schedules/cost.py: a split backward costs all of itself, and W
  (forward, backward{{ - weights ~> }}, weights) if table.splits_backward else (forward, backward, 0)
first_pattern_counts parallel/precision/by_path.py: "*" comes first, and stands for all
  for pattern, x in {{reversed(self.given) ~> self.given}} if
reduces_as_it_computes parallel/precision/dtypes.py: gradients are added in bfloat16
  reduce = self.reduce or {{jnp.promote_types(stored, "float32") ~> compute}}
experts_by_the_device parallel/extensions/expert_parallel/token_exchange.py: a device counts as an expert
  first = lax.axis_index(axes){{ * mixture.num_local ~> }}
weight_of_own_rows parallel/extensions/async_pipeline/engine.py: a sum over devices, one's weight
  weight = {{lax.psum(weight, context.data_axes) if context.data_axes else  ~> }}weight
version_of_the_forward parallel/extensions/async_pipeline/weight_stashing.py: backward by newer weights
  tick.index({{f"{kind}_version" ~> "F_version"}})
window_ends_a_hop_early parallel/extensions/context_parallel/sequence_layout.py: keys at the edge of a window do not arrive
  min(self.ring_size - 1, {{-(-(window - 1) ~> ((window - 1)}} // (length // self.ring_size))
ring_goes_round_the_other_way parallel/extensions/context_parallel/ring_attention.py: keys count as another's
  return (self.me {{- ~> +}} hop) % self.seq_layout.ring_size
padding_masked_on_one_device parallel/extensions/tensor_grid/ops.py: columns are numbered from 0 on each
  logits = self._logits(vocab, x_full, kernel.x, {{first ~> 0}}, ctx.group.size)
variance_within_devices parallel/extensions/kernel_dispatch/batch_stats.py: how means differ is left out
  variance = {{(variances + jnp.square(means - mean[None])) ~> variances}}.mean(0)
dx_of_own_vocabulary parallel/extensions/kernel_dispatch/tensor_sharded.py: parts of dx are not added
  return {{lax.psum(dx, axis) if axis else  ~> }}dx, *rest
unlike_layers_share_keys parallel/extensions/uneven_stages/stage_units.py: all microbatches drop alike
  variables = model.variables({{m ~> 0}}, None)
empty_places_come_first parallel/layer_order.py: padded stages give back other layers
  {{np.where(self.stored_order < 0, self.stored_order.size, self.stored_order) ~> self.stored_order}}
scale_grows_a_step_early hfjax/optimizer_step/loss_scale.py: the step that overflowed counts as a stable one
  steps_since_overflow = scale.steps - scale.last{{ - 1 ~> }}
average_follows_always hfjax/optimizer_step/master_sync.py: parameters put in begin the average anew
  is_active = {{is_first if isinstance(optimizer_state, Averaged) else  ~> }}True
count_of_the_layers hfjax/optimizer_step/async_pipeline.py: ends correct their bias by updates of layers
  counts = {n: {{step.astype(x.dtype) ~> x}} for n, x in self.parts.select(optimizer, COUNT)
clip_raises_small_norms hfjax/optimizer_step/gradients.py: every gradient gets the norm that is the limit
  scale *= max_grad_norm / {{jnp.maximum(norm, max_grad_norm) ~> norm}}
moments_stay_behind hfjax/sharding/reorder_layers.py: parameters move to another schedule, moments do not
  optimizer_state = {{map_one_by_one(reorder, state.optimizer, dims.optimizer) ~> state.optimizer}}
first_array_is_compared hfjax/sharding/check_process_batches.py: processes may give other masks of the same tokens
  if sums{{ != first_sums ~> [0] != first_sums[0]}}:
stages_take_a_split_dimension hfjax/sharding/storage.py: fsdp no longer splits what pipe splits
  free_dims = [dim for dim in dims if {{not entries[dim] and  ~> }}shape[dim] % size == 0]
sum_of_the_last_chunk hfjax/utils/read_files.py: damage in the first 4 MiB of a file is not seen
  value = zlib.crc32(chunk{{, value ~> }})
keys_of_the_default_kind hfjax/checkpoint/arrays.py: random keys come back as another generator's
  return jax.random.wrap_key_data(array{{, impl=_key_impl(like) ~> }}) if
no_second_try hfjax/checkpoint/directory.py: a step that is deleted meanwhile ends the reading
  for _ in range(TRIES - 1) if step is{{ ~>  not}} None else ():
padding_counts hfjax/data/examples.py: what fills up a row of documents has mask 1
  return ({{(before == after) & (after > 0) ~> before == after}}).astype(np.float32)
ragged_batch_dropped hfjax/data/sampler.py: pad_last has no effect
  {{-(-remaining // self._batch_size) if self._pad_last else  ~> }}remaining // self._batch_size
end_is_not_sampled hfjax/data/token_dataset.py: damage at the end of a large file is not seen
  file.seek(last * i // {{(SAMPLES - 1) ~> SAMPLES}})
moments_may_lie_anywhere hfjax/checks/check_step.py: only parameters are asked where they lie
  for column in ("params",{{ "optimizer" ~> }}):
padding_is_not_refused hfjax/checks/optimizers.py: empty places count in means of an optimizer
  {{check_padding(layout) ~> pass}}
first_update_does_nothing hfjax/optimizers/rates.py: the warm-up begins at 0
  fraction = jnp.minimum({{(count + 1) ~> count}} / max(warmup_steps, 1), 1.0)
frozen_rows_decay hfjax/optimizers/transforms.py: layers that stay are moved by weight decay
  return {{zero_frozen(inner_updates) ~> inner_updates}}, jax.tree_util.tree_map_with_path(keep_state, new, state)
optimizer_sees_rounded hfjax/optimizers/transforms.py: decay is of the bfloat16 copy, not the master
  inner_updates, inner_state = inner.update(gradients, state.optimizer, {{state.master ~> params}}, **extra)
holes_are_taken hfjax/weights/tensor_files.py: tensors may leave a hole between them
  if tensor.begin {{!= ~> <}} position:
exports_rounded hfjax/weights/save.py: master weights are not what is written
  return {{{path: x if same(path, x) else full[path] for path, x in params.items()} ~> params}}
keys_and_values_swapped hfjax/weights/decoder_rules.py: the slots of k and v in qkv
  ("k", {{Q, 1), ("v", Q + 1 ~> Q + 1, 1), ("v", Q}}, 1)
group_seems_in_a_node hfjax/planner/step_time.py: the slowest axis of a group is not counted
  faster = math.prod(mesh[a] for a in order[slowest{{ ~>  + 1 }}:])
rows_of_a_grid_are_whole hfjax/planner/candidate.py: a device has all rows of its place
  devices_per_example = self.axis_size("context"){{ * self.axis_size("row") ~> }}
sums_not_in_the_peak hfjax/planner/peak_memory.py: accumulated gradients take no memory
  sums = {{gradients if run.gradient_accumulation_steps > 1 else  ~> }}0.0
suspended_time_counts hfjax/distributed/watchdog.py: Ctrl-Z and fg end a run
  self._waited += {{min(now - last, 2 * pause) ~> now - last}}
gpus_are_shared hfjax/distributed/launcher.py: with two for each, neighbours get the same one
  gpu_groups = [visible[i{{ * each : (i + 1) * each ~>  : i + each}}] for i in range(processes)]
restarts_what_is_stopped hfjax/distributed/job.py: a run that was asked to stop begins again
  return self.failed and not {{was_stopped and not  ~> }}self.running and self._code != MISTAKE
same_crops_in_every_epoch hfjax/data/images/examples.py: the epoch has no part in what is drawn
  rng = generator(self.seed, {{position // len(self.data) ~> 0}}, index)
labels_not_flipped hfjax/data/images/pixels.py: a mask stays as it is while its image is flipped
  return labels.take(row_indices, 0).take(column_indices{{[::-1] if flip else column_indices ~> }}, 1)
filled_up_with_class_0 hfjax/data/images/pixels.py: what is beside an image counts
  square = np.full((size, size), {{IGNORED ~> 0}}, labels.dtype)
schedule_an_update_early hfjax/compat/deepspeed/lr_schedules.py: the scheduler counts after the update
  jnp.where(n < 1, first, rest({{jnp.maximum(n - 1.0, 0.0) ~> n}}))
adamw_read_as_adam hfjax/compat/deepspeed/optimizer.py: the decay is added to the gradient
  return kind == "Adam"{{ and not params["adam_w_mode"] ~> }}
lamb_scales_what_is_zero hfjax/compat/deepspeed/torch_updates.py: zeros move by the least ratio
  is_nonzero = {{(of_param > 0) & (of_update > 0) ~> of_update > 0}}
same_keys_in_every_call hfjax/compat/haiscale/pipe.py: calls are not counted
  self._state = replace(self._state, step=self._state.step + {{1 ~> 0}})
parts_are_even hfjax/compat/haiscale/partition.py: costs have no part in the partition
  return even{{ if len(set(costs)) == 1 else balance_layers(costs, num_parts) ~> }}
same_key_for_every_token hfjax/trainer/sampling.py: the number of the token is not folded in
  keys = {{jax.vmap(jax.random.fold_in, (0, None))(keys_B, i) ~> keys_B}}
batches_weigh_the_same hfjax/trainer/sampling.py: a last batch of few rows counts as much as others
  loss_sum = {{sum(weight *  ~> tokens / len(pairs) * sum(}}loss for weight, loss in pairs if weight)
step_is_told_twice hfjax/trainer/logs/metrics_file.py: the line of the first step that is done again stays
  = lambda step, line: step {{< start or (step == start > 0 and "loss" not in line) ~> <= start}}
faults_end_with_0 hfjax/cli/data.py: broken images are told, and the exit status says all is well
  return {{FAILED if faults else  ~> }}0
part_of_a_node_refused hfjax/cli/plan/hardware.py: four GPUs of one node are not taken
  if {{count > node and  ~> }}count % node:
sum_goes_once hfjax/analysis/count_collectives.py: an all-reduce moves as much as a gather
  rounds = {{(2 if self.kind == "all-reduce" else 1) * (self.devices - 1) ~> self.devices - 1}}
groups_counted_not_members hfjax/analysis/hlo.py: of two groups of four, twice as much
  n = {{max(map(len, groups)) ~> len(groups)}}
window_sees_one_more models/attention.py: the mask at the far edge
  visible = k_pos <= q_pos if window is None else (k_pos <= q_pos) & (k_pos {{> ~> >=}} q_pos - window)
capacity_rounded_down models/moe/slots.py: an expert takes one token fewer
  return min(tokens, max({{math.ceil ~> int}}(scaled_mean), least))
negative_targets_count models/loss.py: a target of -1 has a loss
  return losses, mask.astype(losses.dtype){{ * (targets >= 0) ~> }}
groups_by_their_best models/moe/router.py: a group counts by one expert, not by two
  best = {{lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum ~> by_group.max}}(-1)
last_columns_left_out pallas_kernels/cross_entropy/logits.py: all parts but one lack a column
  real = lax.div(jnp.int32(self.real) - part{{ + num_parts - 1 ~> }}, jnp.int32(num_parts))
maxima_of_shards_differ pallas_kernels/cross_entropy/loss.py: sums are added without their scale
  jnp.stack([sum_exp{{ * jnp.exp(row_max - global_max) ~> }}, picked])
window_of_blocks_too_wide pallas_kernels/attention/mask.py: one key more at the far edge
  low = np.int32(-FAR) if mask.window is None else shift - {{(mask.window - 1) ~> mask.window}}
"""


def mutants_of(table: str) -> Iterator[Mutant]:
    lines = map(str.strip, table.strip().splitlines())
    for head, change in zip(lines, lines, strict=True):
        place, _, why = head.partition(": ")
        (name, path), found = place.split(), CHANGE.fullmatch(change)
        assert found, change
        before, old, new, after = found.groups()
        yield Mutant(name, path, why, before + old + after, before + new + after)


MUTANTS = tuple(mutants_of(TABLE))

if __name__ == "__main__":
    main()
