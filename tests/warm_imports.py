"""What a training run imports: the server from which tests/warm.py forks processes imports it once."""

import gc

import plain
from composer.utils.collect_env import get_cpu_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

import src.data.image_transforms
import src.data.streaming
import src.mlm.model
import src.plots
import src.publish.background
import src.publish.callback
import src.publish.folder
import src.training.guards
import src.training.registry
import src.training.run_log
import src.training.trainer
import src.vision.model

list(TOKENIZER_MAPPING.keys())  # imports hundreds of modules, as AutoTokenizer does
list(MODEL_FOR_CAUSAL_LM_MAPPING.values())  # as many again, as Composer's HuggingFaceModel does
get_cpu_model()  # Composer asks a process of its own
src.publish.folder.subprocess = plain  # folders are tried in processes that start at once
src.publish.background.NICENESS = 0  # otherwise exports wait for an idle core
gc.freeze()  # so that no garbage collection visits, and thereby copies, what all processes share
