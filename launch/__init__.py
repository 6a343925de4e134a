"""Entry points: a rank (`pretrain`) and the submit host (`experiment`). Not part of the wheel."""
