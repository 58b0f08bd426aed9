"""What pages, examples and messages told users to import before the code was rebuilt is there."""

import importlib
import pkgutil
from functools import reduce
from types import ModuleType

import pytest

import hfjax

# As of commit dd8e156: what README.md, docs, examples, docstrings and messages showed, and what
# the packages had in __all__.
NAMES = """
hfjax:DDP
hfjax:FSDP
hfjax:FSDP.edit
hfjax:HOST_OPTIMIZER
hfjax:HOST_PARAMETERS
hfjax:HSDP
hfjax:PIPE
hfjax:SEQUENCE
hfjax:TENSOR
hfjax:ZERO1
hfjax:ZERO1.edit
hfjax:ZERO2
hfjax:ZERO3
hfjax:Checkpoints
hfjax:Collectives
hfjax:Execution
hfjax:GPipe
hfjax:Interleaved1F1B
hfjax:Keep
hfjax:Layout
hfjax:Mean
hfjax:Offload
hfjax:Partition
hfjax:PipeDream
hfjax:Precision
hfjax:Remat
hfjax:Restored
hfjax:Schedule
hfjax:Schedule.from_text
hfjax:State
hfjax:Strategy
hfjax:Transfers
hfjax:adamw
hfjax:averaged
hfjax:by_path
hfjax:canonical
hfjax:collectives
hfjax:ema
hfjax:eval_step
hfjax:full
hfjax:gather_rows
hfjax:init
hfjax:init_distributed
hfjax:latest
hfjax:layout
hfjax:least_offload
hfjax:make_mesh
hfjax:master
hfjax:matching
hfjax:offload
hfjax:partition
hfjax:rate
hfjax:recorded
hfjax:restore
hfjax:rows_of_process
hfjax:save
hfjax:scaled
hfjax:shard_batch
hfjax:stashes
hfjax:target_devices
hfjax:train_step
hfjax:transfers
hfjax.__main__:main
hfjax.checkpoint:Checkpoints
hfjax.checkpoint:Keep
hfjax.checkpoint:Restored
hfjax.checkpoint:latest
hfjax.checkpoint:recorded
hfjax.checkpoint:restore
hfjax.checkpoint:save
hfjax.data:Loader
hfjax.data:TokenSet
hfjax.data:load_tokenizer
hfjax.data:prepare
hfjax.data:share
hfjax.data:standard_library
hfjax.data:write_tokens
hfjax.models.gpt:GPT
hfjax.models.gpt:GPTConfig
hfjax.models.gpt:GPTConfig.preset
hfjax.models.gpt:GPTConfig.tiny
hfjax.models.gpt:PRESETS
hfjax.models.gpt:next_token_loss
hfjax.models.llama:Llama
hfjax.models.llama:LlamaConfig
hfjax.models.llama:LlamaConfig.preset
hfjax.models.parts:Dropout
hfjax.models.parts:anywhere
hfjax.models.parts:plain
hfjax.models.parts:stacked
hfjax.pallas_kernels.handing:is_causal_attention
hfjax.pallas_kernels.handing:takes_projection
hfjax.parallel.baselines.ring:ring_all_reduce
hfjax.parallel.context.deal:work
hfjax.parallel.schedules.named:Schedule
hfjax.plan:Layout
hfjax.processes:Stop
hfjax.processes:Watchdog
hfjax.processes:check_same
hfjax.processes:exit_code
hfjax.processes:leaving
hfjax.processes:say
hfjax.processes:speaks
hfjax.run:Parts
hfjax.run:Result
hfjax.run:Train
hfjax.run:evaluate
hfjax.run:generate
hfjax.run:load
hfjax.run:train
hfjax.run.config:Mesh
hfjax.run.config:Optimizer
hfjax.testing:assert_strategies_agree
hfjax.testing:strategies
""".split()
LATER = """
hfjax:module
hfjax.models.attention:dot_product
hfjax.models.stateful:Stateful
""".split()  # shown since, until commit 92464be


@pytest.mark.parametrize("name", NAMES + LATER)
def test_what_users_were_shown_can_be_imported(name):
    module, _, attributes = name.partition(":")
    found = reduce(getattr, attributes.split("."), importlib.import_module(module))
    assert not isinstance(found, ModuleType)


def packages():
    """Return the names of hfjax and of all packages in it."""
    walked = pkgutil.walk_packages(hfjax.__path__, "hfjax.")
    return ["hfjax", *(found.name for found in walked if found.ispkg)]


@pytest.mark.parametrize("package", packages())
def test_no_module_has_the_name_of_something_its_package_has(package):
    """Whoever imports such a module by its name would be given the other thing, or it the other."""
    found = importlib.import_module(package)
    exported = set(getattr(found, "__all__", []))
    exported |= {name for name, value in vars(found).items() if not isinstance(value, ModuleType)}
    modules = {inside.name for inside in pkgutil.iter_modules(found.__path__)}
    assert sorted(exported & modules) == []
