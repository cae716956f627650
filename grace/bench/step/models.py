"""The sizes of the models, equal in all frameworks and similar to those of the GRACE paper's Table II."""

from __future__ import annotations

NAMES = ("mlp", "vgg", "lstm", "ncf", "resnet", "transformer")

# Units between the dense layers: 25.2 M parameters.
MLP = (1024, 4096, 4096, 1024)
# Channels of VGG16's convolutions; None is a pooling layer.
VGG = (64, 64, None, 128, 128, None, 256, 256, 256, None, 512, 512, 512, None, 512, 512, 512, None)
CLASSES = 10
# Size of the Penn Treebank's vocabulary, and units per layer.
WORDS, HIDDEN = 10_000, 650
# Users and items of MovieLens-20M.
USERS, ITEMS = 138_493, 26_744
TOKENS = 8_000
