"""Smooth labels over the vocabulary instead of one tensor-parallel rank's part of it.

What: `vocab_parallel_cross_entropy` counts the tokens of all ranks, and takes the mean of their
    log-probabilities, if it is called with `label_smoothing`.
Why: Both are taken over the rank's own part. With tensor parallelism the loss differs between the
    ranks, and losses and gradients are wrong: with TP 2, a vocabulary of 8 and a smoothing of 0.1,
    losses were off by 0.07 (on two gloo ranks, 0.19.2; all versions have it). The logarithm of a
    probability that rounds to 0 is infinite as well, even on a single rank. Megatron's own models
    do not smooth labels; losses of one's own do.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7466 (open)
Remove: when the mean of the log-probabilities is reduced over the ranks.
Numerics: changes results of calls with label smoothing and tensor parallelism; without tensor
    parallelism, reorders their sums
"""

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.forward"


def _edit(pins: dict[str, str], group: str) -> Edit:
    return Edit(
        target=TARGET,
        pins=pins,
        edit=in_order(
            inserting(
                f"""
                if label_smoothing > 0:
                    # Before exp() replaces the logits, because small probabilities round to 0.
                    sum_logits = vocab_parallel_logits.sum(dim=-1)
                    sum_logits -= partition_vocab_size * logits_max
                    torch.distributed.all_reduce(sum_logits, group={group})
                """,
                after="partition_vocab_size = vocab_parallel_logits.size()[-1]",
            ),
            replacing(
                "vocab_size = exp_logits.size(-1)",
                "vocab_size = exp_logits.size(-1) * world_size",
            ),
            replacing(
                """
                log_probs = torch.log(exp_logits)
                mean_log_probs = log_probs.mean(dim=-1)
                """,
                "mean_log_probs = sum_logits / vocab_size - torch.log(sum_exp_logits)",
            ),
        ),
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        _edit(
            {
                "0.15.3": "83104556c99828f5",
                "0.16.1": "83104556c99828f5",
                "0.17.1": "83104556c99828f5",
                "0.18.2": "83104556c99828f5",
            },
            "get_tensor_model_parallel_group()",
        ),
        _edit(
            {
                "0.19.2": "08cf6d7d1aa18da5",
                "main-d98e8a64": "08cf6d7d1aa18da5",
                "dev-d48bd6be": "08cf6d7d1aa18da5",
            },
            "tp_group",
        ),
    ),
    reached="never",  # Megatron's models smooth no labels
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return "label_smoothing" in text and "log_probs.mean(" not in text


def verify() -> None:
    import torch
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from torch.nn.functional import one_hot

    from cppmega.proof import ranks

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, 8, generator=generator, dtype=torch.float64)
    logits[0, 0, 3] = 300.0  # the probabilities of the other tokens round to 0
    labels = torch.randint(8, (5, 2), generator=generator)
    weight = torch.rand(5, 2, generator=generator, dtype=torch.float64) + 0.1

    def gradients(loss, given):  # type: ignore[no-untyped-def]
        (loss * weight).sum().backward()
        return loss.detach().double(), given.grad.double()

    def work(rank):  # type: ignore[no-untyped-def]
        answers = {}
        for smoothing in (0.0, 0.1):
            mine = logits.float().chunk(2, -1)[rank].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(mine * 1.0, labels, smoothing)
            answers[smoothing] = gradients(loss, mine)
        return answers

    def reference(smoothing):  # type: ignore[no-untyped-def]
        """The definition: a share of the probability for each token other than the label."""
        given = logits.clone().requires_grad_()
        share = torch.full_like(given, smoothing / 7).masked_fill(
            one_hot(labels, 8) > 0, 1 - smoothing
        )
        return gradients(-(share * given.log_softmax(-1)).sum(-1), given)

    for rank, answers in enumerate(ranks.on_two(work)):
        for smoothing, (loss, gradient) in answers.items():
            wanted, whole = reference(smoothing)
            error = (loss - wanted).abs().max()
            assert torch.allclose(loss, wanted, rtol=1e-5), f"rank {rank}: losses off by {error}"
            assert torch.allclose(gradient, whole.chunk(2, -1)[rank], atol=1e-6), (rank, smoothing)
