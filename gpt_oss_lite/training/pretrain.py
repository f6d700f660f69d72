"""The training loop.

    windows -> model.hidden_states -> head_cross_entropy -> backward, x accumulation
            -> finite check on the device -> clip -> optimizer -> schedule -> log, evaluate, save when due

A step is a function of the run's state and the data alone. Everything that a run may be stopped and resumed with is in
`RunState` and in what a checkpoint holds; everything that it records lies in one folder (see `run_folder`).

Shapes: B micro-batch, T positions, A micro-batches of a step.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt_oss_lite.training.compile import Forward
from gpt_oss_lite.training.dataset import document_ids_of
from gpt_oss_lite.training.evaluation import evaluate
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.loss import IGNORE_INDEX, head_cross_entropy
from gpt_oss_lite.training.nan_guard import micro_batch_flags
from gpt_oss_lite.training.optimizer import clip_gradients, fill_missing_gradients, gradient_norm, update_unless
from gpt_oss_lite.training.run import PretrainOptions, Run, open_run
from gpt_oss_lite.training.stop import StopRequest
from shared_data.console import say

EXIT_DONE = 0
EXIT_STOPPED = 3
EXIT_NAN_GUARD = 4
