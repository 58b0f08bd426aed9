from hfjax.run.build import Parts as Parts
from hfjax.run.config import Train as Train
from hfjax.run.files import load as load
from hfjax.run.loop import Result as Result, train as train
from hfjax.run.sampling import evaluate as evaluate, generate as generate
