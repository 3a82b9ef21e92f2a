"""Print how large the package is: lines and files by room, its longest files, fullest folders.

python .ci/sizes.py [PACKAGE]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path


def main(package: Path) -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in package.rglob("*.py")}
    rooms, files, folders = Counter[str](), Counter[str](), Counter[str]()
    for path, count in lines.items():
        room = path.relative_to(package).parts[0]
        rooms[room] += count
        files[room] += 1
        folders[str(path.parent)] += 1
    print(f"{'lines':>7} {'files':>5}  room")
    for room, count in rooms.most_common():
        if (package / room).is_dir():
            print(f"{count:7,} {files[room]:5}  {package.name}/{room}/")
    print(f"{sum(lines.values()):7,} {len(lines):5}  {package.name}/")
    longest = Counter(lines).most_common(5)
    print("longest files:  ", *(f"{path} {count}" for path, count in longest))
    print("fullest folders:", *(f"{path}/ {count}" for path, count in folders.most_common(5)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "asyncllm"))
