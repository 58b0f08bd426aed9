from hfjax.trainer.build import RunComponents as RunComponents
from hfjax.trainer.config import TrainConfig as TrainConfig
from hfjax.trainer.config_io import load as load
from hfjax.trainer.logs.trackers import Tracker as Tracker
from hfjax.trainer.sampling import evaluate as evaluate, generate as generate
from hfjax.trainer.train_loop import Result as Result, train as train
