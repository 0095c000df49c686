"""What tests start with torchrun: commands of penstock, one after the other in the processes of one launch."""

import json
import sys
from pathlib import Path

from penstock.cli import group

for words in json.loads(Path(sys.argv[1]).read_text()):
    group(words, prog_name="penstock", standalone_mode=False)
