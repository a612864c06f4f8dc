"""Entry scripts: `python -m mindspeed_mm.entry.pretrain_vlm`, or `torchrun … -m mindspeed_mm.entry.pretrain_vlm`."""
