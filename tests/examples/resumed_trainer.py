"""A run of Hugging Face's Trainer, and the same run resumed at step 8 of 12 from the files of all ranks.

    torchrun --standalone --nproc-per-node 2 tests/examples/resumed_trainer.py FOLDER

Rank 0 prints the largest difference of a weight as JSON, and whether the exchanges continued exactly.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import digits  # noqa: E402
import transformers_digits  # noqa: E402
from digits_torch import tensors  # noqa: E402


class Compress(transformers_digits.Compress):
    """Compression whose state is saved and loaded as docs/get_started/trainers.md says."""

    exact: bool | None = None

    def file(self, args: Any, state: Any) -> str:
        """Return the file of this rank in the checkpoint of a step."""
        return f"{args.output_dir}/checkpoint-{state.global_step}/grace-{args.process_index}.pt"

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the state of the exchange beside the Trainer's own checkpoint."""
        torch.save(self.exchange.state_dict(), self.file(args, state))

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Register the model; if the run is resumed, load the state of the exchange."""
        super().on_train_begin(args, state, control, **others)
        if state.global_step:
            self.exact = self.exchange.load_state_dict(torch.load(self.file(args, state)))


def train(folder: str, resumed: bool, images: list[dict[str, torch.Tensor]]) -> tuple[list[torch.Tensor], Compress]:
    """Return the weights after 12 steps, and the callback."""
    torch.manual_seed(0)
    model = transformers_digits.Classifier()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=12,
            save_steps=8,
            per_device_train_batch_size=16,
            dataloader_drop_last=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=images,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None),
    )
    compress = Compress(trainer, {"compressor": "topk", "compress_ratio": 0.01})
    trainer.add_callback(compress)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-8" if resumed else None)
    return [p.detach().clone() for p in model.parameters()], compress


def main(folder: str) -> None:
    """Train twice and compare."""
    torch.set_num_threads(1)
    images = [{"images": images, "labels": labels} for images, labels in tensors(digits.load_data().train)]
    without, _ = train(folder, False, images)
    again, compress = train(folder, True, images)
    if torch.distributed.get_rank() == 0:
        difference = max(float((a - b).abs().max()) for a, b in zip(without, again, strict=True))
        print(json.dumps({"difference": difference, "exact": compress.exact}))


if __name__ == "__main__":
    main(sys.argv[1])
