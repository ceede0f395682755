"""Compressed models on the Hugging Face Hub: folders in its conventions, model cards, upload and download."""

from tensigma.hub.card import model_card
from tensigma.hub.folders import from_pretrained, save_pretrained
from tensigma.hub.uploading import push_to_hub

__all__ = ["from_pretrained", "model_card", "push_to_hub", "save_pretrained"]
