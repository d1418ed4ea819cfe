"""A real offline SGLang engine in a process of its own, with `--load-format mx`; run by the Python of `sglang_options`.

    python -u -m tests.support.sglang_engine '{"model": FOLDER, "tp": 1, "extra": {}}'

Talks as `vllm_engine` does: prints `tokens [[...], ...]` for the prompts of `vllm_model`, then again for each line `ask`; `refit {JSON}`
takes over a version (arguments of `mx_sglang.drive.refit`) and prints `refitted NUMBER REPORTED`; `disk FOLDER` has SGLang itself read
other weights. Ends with its input. A failure prints `failed MESSAGE`; a scheduler that fails takes this process with it, and only its log
says why.
"""

from __future__ import annotations

import json
import os
import sys

from tests.support.sglang_options import SAMPLING, environment, options
from tests.support.vllm_model import PROMPTS


def main():
    spec = json.loads(sys.argv[1])
    tp = spec.get("tp", 1)
    os.environ.update(environment(tp))
    import sglang

    from mx_sglang.drive import refit

    chosen = {"load_format": spec["load_format"]} if "load_format" in spec else {}
    # text, as SGLang wants it
    extra = json.dumps(spec.get("extra", {}))
    try:
        engine = sglang.Engine(
            **options(spec["model"], tp=tp, extra=extra, log_level="info", **chosen, **spec.get("options", {})),
        )
    except Exception as error:
        print("failed", repr(error))
        raise

    def tokens():
        answers = engine.generate(input_ids=spec.get("prompts", PROMPTS), sampling_params=SAMPLING)
        print("tokens", json.dumps([answer["output_ids"] for answer in answers]))

    tokens()
    for line in sys.stdin:
        if line.strip() == "ask":
            tokens()
        if line.startswith("disk "):
            print("updated", engine.update_weights_from_disk(line.split()[1], "auto")[0])
        if line.startswith("refit "):
            try:
                number = refit(engine, **json.loads(line.removeprefix("refit ")))
                (answer,) = engine.generate(input_ids=[[1, 2]], sampling_params=SAMPLING)
                print("refitted", number, answer["meta_info"]["weight_version"])
            except Exception as error:
                print("failed", repr(error))
    engine.shutdown()


if __name__ == "__main__":
    main()
