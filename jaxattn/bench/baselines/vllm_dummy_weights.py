"""A vLLM worker extension that gives dummy weights ordinary values."""

WEIGHTS = "set_ordinary_weights"
WORKER_EXTENSION = f"{__name__}.VllmDummyWeights"


class VllmDummyWeights:
    """A vLLM worker extension that replaces dummy weights that would distort the load."""

    def set_ordinary_weights(self) -> dict[str, int]:
        """Replaces the weights; returns the number of changed modules by kind."""
        import torch

        changed = {"norms": 0, "routers": 0, "biases": 0, "embeddings": 0}
        model = self.get_model()  # type: ignore[attr-defined]  # of the worker
        with torch.inference_mode():
            torch.manual_seed(1)
            for name, module in model.named_modules():
                weight, kind = getattr(module, "weight", None), type(module).__name__
                if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
                    continue
                if "Norm" in kind and weight.dim() == 1:
                    weight.fill_(0.0 if "Gemma" in kind else 1.0)  # Gemma's adds 1
                    changed["norms"] += 1
                elif kind.startswith("VocabParallelEmbedding"):
                    weight.normal_()
                    changed["embeddings"] += 1
                elif name.endswith((".gate", ".shared_expert_gate")) and weight.dim() == 2:
                    weight.normal_(std=weight.shape[-1] ** -0.5)
                    changed["routers"] += 1
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith("e_score_correction_bias"):
                    value.zero_()
                    changed["biases"] += 1
        return changed
