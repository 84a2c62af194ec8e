# Kept sets inside the model's own forward pass, and the loss of what follows (paper, section 4). The contexts come
# after those of the run in the same draw, so that flat cells are chosen on other text than the loss is measured on.
LOST = models_of("loss")


use rule make_contexts as make_loss_contexts with:
    output:
        "<results>/loss/contexts/{model}/{arm}.json",
    log:
        "<logs>/make_loss_contexts/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/make_loss_contexts/{model}/{arm}.tsv"
    params:
        text=lambda wildcards: config["text_sources"][wildcards.arm],
        hashes=lambda wildcards: hashes([config["text_sources"][wildcards.arm]["wheel"]]),
        windows=lambda wildcards: {
            "length": config["contexts"]["length"],
            "count": config["loss"]["contexts"],
            "first": config["contexts"]["per_arm"],
            "seed": config["contexts"]["seeds"][wildcards.arm],
        },
        code=code("make_contexts.py"),
        locked=locked("make_contexts.py"),
    message:
        "make held-out contexts of {wildcards.arm} for {wildcards.model}"


rule loss:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        contexts="<results>/loss/contexts/{model}/{arm}.json",
        instances="<results>/instances.parquet",
    output:
        "<results>/loss/{model}/{arm}.parquet",
    log:
        "<logs>/loss/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/loss/{model}/{arm}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(3000),
        gpu=int(config["device"] != "cpu"),
    params:
        settings={key: config["loss"][key] for key in ("s", "continuation", "candidates")},
        device=config["device"],
        code=code("loss.py"),
        locked=locked("loss.py"),
    message:
        "loss of {wildcards.model} on {wildcards.arm}, kept sets in its forward pass"
    script:
        "../scripts/loss.py"


rule loss_table:
    input:
        expand("<results>/loss/{model}/{arm}.parquet", model=LOST, arm=ARMS),
    output:
        csv=shown("<results>/tables/loss.csv", "loss"),
        md="<results>/tables/loss.md",
    log:
        "<logs>/loss_table.log",
    benchmark:
        "<benchmarks>/loss_table.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        labels={model: LABELS[model] for model in LOST},
        code=code("loss_table.py"),
        locked=locked("loss_table.py"),
    message:
        "make the table of losses"
    script:
        "../scripts/loss_table.py"


rule loss_all:
    input:
        rules.loss_table.output if LOST else [],
    message:
        "losses in the forward pass are measured"
