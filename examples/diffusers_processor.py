"""The paged window behind diffusers' attention-processor interface, for models of its `Attention`.

Run it: ``python examples/diffusers_processor.py``.
"""

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

import chunkattn

HEADS, HEAD_SIZE, LAYERS, FRAME = 4, 32, 2, 64


class PagedAttnProcessor:
    """A processor for self-attention of one layer; the others (cross-attention) keep their own."""

    def __init__(self, layer: int):
        self.layer = layer
        self.forward: chunkattn.ForwardContext | None = None  # set by `use` around each call

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **_):
        if encoder_hidden_states is not None or attention_mask is not None:
            raise NotImplementedError("a paged window serves self-attention without a mask")
        rows = hidden_states.squeeze(0)  # a session is one rollout: a batch of one
        query, key, value = (
            project(rows).unflatten(-1, (attn.heads, -1))
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        out = self.forward.write_attend(self.layer, query, key, value, softmax_scale=attn.scale)
        return attn.to_out[1](attn.to_out[0](out.flatten(1))).unsqueeze(0)


def install(model: nn.Module) -> list[PagedAttnProcessor]:
    """Give each self-attention of a model a processor, in the order of its modules."""
    layers = [m for m in model.modules() if isinstance(m, Attention) and not m.is_cross_attention]
    processors = [PagedAttnProcessor(layer) for layer in range(len(layers))]
    for module, processor in zip(layers, processors, strict=True):
        module.set_processor(processor)
    return processors


def use(processors: list[PagedAttnProcessor], forward: chunkattn.ForwardContext) -> None:
    for processor in processors:
        processor.forward = forward


@torch.no_grad()
def main(spans: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Attention(HEADS * HEAD_SIZE, heads=HEADS, dim_head=HEAD_SIZE) for _ in range(LAYERS))
    )
    processors = install(model)
    config = chunkattn.ARDiffusionKVConfig(True, FRAME, window_chunks=3, sink_chunks=1)
    sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE}
    memory = {"block_size": FRAME, "max_model_len": 1 << 20, "available_bytes": 1 << 28}
    place = {"dtype": torch.float32, "device": torch.device("cpu"), "local_branches": 1}
    cache = chunkattn.ARDiffusionKVCache(config, **sizes, **memory, **place)
    session, outs = cache.open_session("film"), []
    for _ in range(spans):
        with session.forward(seq_len=FRAME, commit=True) as forward:
            use(processors, forward)
            outs.append(model(torch.randn(1, FRAME, HEADS * HEAD_SIZE)).squeeze(0))
    print(f"{spans} spans, the last one sees the blocks {forward.history_block_ids}")
    return outs


if __name__ == "__main__":
    main()
