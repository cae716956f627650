"""The run of Hugging Face's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

import grace
from tests.examples.resumed_trainer import ACCUMULATED, BATCH, CONFIG, SAVED, STEPS, Classifier, Images, Run


class Watch(transformers.TrainerCallback):
    """Keeps the state of the exchange before the first step."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.began = callback, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.began is None and self.callback.exchange is not None:
            self.began = self.callback.exchange.state_dict()


def train(folder: Path, resume: bool) -> Run:
    model = Classifier()
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_steps=SAVED,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=2,
        learning_rate=0.01,
        bf16=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        report_to="none",
        disable_tqdm=True,
    )
    images = Images()
    trainer = transformers.Trainer(model, arguments, train_dataset=images, eval_dataset=images)
    callback = grace.torch.trainers.transformers.GraceCallback(trainer, CONFIG)
    watch = Watch(callback)
    trainer.add_callback(callback)
    trainer.add_callback(watch)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    # A checkpoint contains the history before it.
    begin = SAVED if resume else 0
    logged = [name for entry in trainer.state.log_history if entry["step"] > begin for name in entry]
    return Run([p.detach().clone() for p in model.parameters()], callback.exchange, watch.began, logged)
