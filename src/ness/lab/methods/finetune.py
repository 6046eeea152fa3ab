"""Fine-tuning: everything trains on every task, nothing is protected. What forgetting looks like."""

from ness.lab.methods.base import Method, MethodSpec

METHOD = MethodSpec(
    name="finetune",
    title="Plain training, nothing protected",
    build=Method,
    keeps="nothing",
    kept_at_most=lambda sizes, own: 0,
)
