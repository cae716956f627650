"""What the models have in common in all frameworks: sizes like those of GRACE's Table II."""

from __future__ import annotations

NAMES = ("mlp", "vgg", "lstm", "ncf", "resnet", "transformer")

# Units of the dense layers' ends: 25.2 M parameters.
MLP = (1024, 4096, 4096, 1024)
# Channels of VGG16's convolutions; None is a pooling.
VGG = (64, 64, None, 128, 128, None, 256, 256, 256, None, 512, 512, 512, None, 512, 512, 512, None)
CLASSES = 10
# The Penn Treebank's words, and units per layer.
WORDS, HIDDEN = 10_000, 650
# MovieLens-20M's.
USERS, ITEMS = 138_493, 26_744
TOKENS = 8_000
