"""Train the model of my_model.py: the five callbacks, and the call."""

from __future__ import annotations

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import; megatron's get_args answers after it)

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from megatron.training import get_args
from my_model import END, LONGEST, PAD, VOCABULARY, WORDS, CustomModel, OwnSharding
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mindspeed_mm.training import pretrain
from mindspeed_mm.utils.device import move_to_device


class CustomDataset(Dataset):
    """Each digit in each language.

    Args:
        path: an .npz file with `pixels` [digits, 8, 8] and `labels` [digits].
    """

    def __init__(self, path):
        held = np.load(path)
        self.pixels = torch.from_numpy(held["pixels"]).float() / 16
        self.labels = held["labels"]
        self.languages = list(WORDS)

    def __len__(self):
        return len(self.labels) * len(self.languages)

    def __getitem__(self, index):
        digit, language = divmod(index, len(self.languages))
        language = self.languages[language]
        letters = [VOCABULARY.index(letter) for letter in WORDS[language][self.labels[digit]]]
        ids = torch.full((LONGEST,), PAD)
        labels = torch.full((LONGEST,), -100)
        ids[: len(letters) + 1] = torch.tensor([VOCABULARY.index(language), *letters])
        labels[: len(letters) + 1] = torch.tensor([*letters, END])
        return {"pixels": self.pixels[digit], "ids": ids, "labels": labels}


def build_dataloader(dataset, shuffle):
    """A loader of one's own: each data-parallel rank takes its part."""
    args = get_args()
    sampler = DistributedSampler(dataset, args.data_parallel_size, args.data_parallel_rank, shuffle=shuffle)
    return DataLoader(dataset, args.micro_batch_size, sampler=sampler, num_workers=args.num_workers, drop_last=True)


def model_provider(*args, **kwargs):
    config = get_args().mm.model
    model = OwnSharding(config) if config.own_sharding else CustomModel(config)

    return model


def get_batch(data_iterator, args=None):
    """Generate a batch."""
    if data_iterator is not None:
        batch = next(data_iterator)
    else:
        raise ValueError("Data iterator is None. Unable to retrieve batch.")
    move_to_device(batch, get_args().params_dtype)

    return batch


def compute_loss(output):
    """The sum over the letters to be learnt and their number: the division is the backend's, over the global batch.

    The figures are logged: pairs of a sum and what it is to be divided by.
    """
    logits, labels = output["logits"].float(), output["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    targets = labels != -100
    whole_words = ((logits.argmax(-1) == labels) | ~targets).all(-1)
    return loss, targets.sum(), {"words_right": (whole_words.sum(), torch.tensor(len(labels)))}


def loss_func(output_tensor):
    loss = compute_loss(output_tensor)
    return loss


def forward_step(data_iterator, model):
    """Forward step."""
    batch_data = get_batch(data_iterator)
    output_tensor = model(**batch_data)
    return output_tensor, loss_func


def train_valid_test_datasets_provider():
    """Build train, valid, and test datasets."""
    data = get_args().mm.data
    train_dataloader = build_dataloader(CustomDataset(data.train), shuffle=True)
    valid_dataloader = build_dataloader(CustomDataset(data.heldout), shuffle=False)

    return train_dataloader, valid_dataloader, None


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step_func=forward_step)
