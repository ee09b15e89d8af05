# SPDX-License-Identifier: Apache-2.0
"""Train the policy from `examples/online_serving/train_policy.py` on this machine, and save the
results.

    python benchmarks/train_policy.py                    # a few minutes on two quiet CPU cores

The benchmark reports the training time. It also reports how many metres closer to a landmark in the
demo world the trained policy and random keys each get in new episodes.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, save

EXAMPLE = Path(__file__).parents[1] / "examples" / "online_serving" / "train_policy.py"


def main() -> None:
    example = runpy.run_path(str(EXAMPLE))
    parser = example["make_parser"]()
    parser.add_argument("--name", default="train_policy", help="name of the result file")
    add_output_arguments(parser)
    args = parser.parse_args()
    save(args.name, {"result": example["main"](args)}, args)


if __name__ == "__main__":
    main()
