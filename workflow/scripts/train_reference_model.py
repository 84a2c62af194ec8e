"""One small model, tokenizer and all, from its seeds; a line on how it differs from the committed one."""

from pathlib import Path

from contourkv.logfile import logged

with logged(snakemake.log[0]):
    from contourkv.contexts.parting import part_arms
    from contourkv.models.reference import compare, train_reference_model

    params, made = snakemake.params, Path(snakemake.output[0]).parent
    settings, committed = params.settings, Path(params.committed)
    texts = part_arms(
        settings["arms"],
        params.text_sources,
        params.wheels,
        settings["phases"][-1]["window"],
        settings["held_out"]["windows"],
        params.hashes,
    )
    train_reference_model(settings, texts, made)
    found = compare(committed, made) if committed.is_dir() else "there is none"
    print(f"{made} beside {committed}: {found}")
