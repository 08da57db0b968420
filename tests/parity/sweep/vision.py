"""The usual models of timm, at small pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support.timm_alone import import_timm

_SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}
_PATCH = {**_SMALL, "patch_size": 8}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _PATCH,
    "deit_tiny_patch16_224": _PATCH,
    "deit3_small_patch16_224": _PATCH,
    "beit_base_patch16_224": _PATCH,
    "beitv2_base_patch16_224": _PATCH,
    "eva02_tiny_patch14_224": _PATCH,
    "cait_xxs24_224": {**_PATCH, "depth_token_only": 1},
    "vit_relpos_small_patch16_224": _PATCH,
    "vit_base_patch16_siglip_224": _PATCH,
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4},
    "swinv2_tiny_window8_256": {"img_size": 32, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4},
    "convnext_atto": {**_STAGES},
    "convnextv2_atto": {**_STAGES},
    "mixer": {"block_layer": "MixerBlock"},
    "resmlp": {"block_layer": "ResBlock", "mlp_ratio": 4},
    "gmlp": {"block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp", "mlp_ratio": 6},
    "resnet18": {"channels": (8, 16, 16, 32)},
    "resnet26": {"channels": (8, 8, 8, 16)},
    "resnext26ts": {},
    "regnetx_002": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2, 2, 2)},
    "edgenext_xx_small": {},
    "pvt_v2_b0": {},
    "poolformer_s12": {},
    "levit_128s": {},
    "twins_svt_small": {"img_size": 32, "embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1)},
    "coat_lite_tiny": {"img_size": 32},
    "maxvit_nano_rw_256": {"img_size": 64},
    "visformer_tiny": {"img_size": 32},
}
PICTURE = {"levit_128s": 224, "maxvit_nano_rw_256": 64}


def prepare(name: str) -> tuple[nn.Module, Callable[[int], dict[str, Any]], Callable[[Any], torch.Tensor]]:
    timm = import_timm()
    torch.manual_seed(0)
    settings = MODELS[name]
    if "block_layer" in settings:  # timm's names for these fix all sizes
        mixers = timm.models.mlp_mixer
        settings = {key: getattr(mixers, value) if isinstance(value, str) else value for key, value in settings.items()}
        model = mixers.MlpMixer(5, 32, patch_size=8, num_blocks=2, embed_dim=32, **settings)
    else:
        model = timm.create_model(name, pretrained=False, num_classes=5, **settings)
    size = sum(param.numel() for param in model.parameters())
    if size > 20_000_000:
        raise ValueError(f"{size:,} parameters: not tiny")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    model.train()
    side = PICTURE.get(name, 32)

    def batch(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return {"x": torch.randn(4, 3, side, side, generator=generator)}

    def loss(output: Any) -> torch.Tensor:
        return F.cross_entropy(output.float(), torch.arange(4) % 5)

    loss(model(**batch(0))).backward()
    model.zero_grad()
    return model, batch, loss
