"""Runs lm-eval's local-completions on a local task; prints what it asked and the log-likelihoods that it got.

It runs in an environment of its own. Reads JSON from standard input: url, model, tokenizer, data and cache (paths).
"""

import json
import os
import sys

given = json.load(sys.stdin)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": given["cache"],
    "TOKENIZERS_PARALLELISM": "0",
}

import lm_eval  # noqa: E402

COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": given["data"]}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "num_fewshot": 0,
}
CHOICES = {
    "task": "quire_choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
WHOLE = {
    "task": "quire_whole",
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}],
}


def main() -> None:
    arguments = {"model": given["model"], "base_url": given["url"], "tokenizer": given["tokenizer"]}
    arguments |= {"tokenizer_backend": "huggingface", "max_length": 1024, "num_concurrent": 2}
    tasks = [COMMON | CHOICES, COMMON | WHOLE]
    found = lm_eval.simple_evaluate(
        "local-completions", model_args=arguments, tasks=tasks, batch_size=4, log_samples=True, bootstrap_iters=0
    )
    samples = [(name, sample) for name, each in found["samples"].items() for sample in each]
    rows = [(name, sample["arguments"], sample["resps"]) for name, sample in samples]
    sys.stdout.write("\n" + json.dumps(rows, default=list))


main()
