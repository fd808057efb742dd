"""The package's own checkpoint format, and safetensors code shared with Hugging Face folders."""

from jaxattn.models.checkpoint.native_format import EMBEDDED as EMBEDDED
from jaxattn.models.checkpoint.native_format import CheckpointError as CheckpointError
from jaxattn.models.checkpoint.native_format import load as load
from jaxattn.models.checkpoint.native_format import read_config as read_config
from jaxattn.models.checkpoint.native_format import read_tensors as read_tensors
from jaxattn.models.checkpoint.native_format import save as save
