"""What `import ness` adds to `import torch`: the fastest of several fresh processes each, interleaved."""

import subprocess
import sys
import time

ROUNDS = 7


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    codes = {"import torch": "import torch", "import torch, ness": "import torch, ness"}
    fastest = dict.fromkeys(codes, float("inf"))
    for _ in range(ROUNDS):
        for name, code in codes.items():
            fastest[name] = min(fastest[name], seconds(code))
    plain, both = fastest.values()
    print(f"import torch {plain:.2f} s, with ness {both:.2f} s: adds {both - plain:.2f} s ({both / plain:.2f} ×)")


if __name__ == "__main__":
    main()
