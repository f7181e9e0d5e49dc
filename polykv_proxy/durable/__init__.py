"""KV that outlives slots, engines and this process: saved on disk, restored when that pays.

``identity`` says what a saved state belongs to, ``gguf`` what tells one model file from another, ``sidecar``
what stands beside a slot file, ``names`` what the files are called, ``found`` which of them can be believed,
``store`` how they come and go so that a crash leaves the old state or none.
``canary`` finds out whether the loaded model goes on from a file, ``sessions`` and ``pools`` save and
restore, and ``service`` is all of them for those who serve requests.
"""
