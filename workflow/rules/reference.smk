# The models of source `trained`, again from their seeds. No other rule reads what this one makes, and `all` does not
# ask for it: the models that are measured lie in config/reference_models. A training that was cut off goes on from a
# checkpoint beside its folder.
REFERENCE = config["reference"]
REFERENCE_FILES = [
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "loss.csv",
    "training.json",
]
# settings of one training: those of all, then its own; and the text sources of its arms
TRAININGS = {model: {**REFERENCE["training"], **own} for model, own in REFERENCE["models"].items()}
TRAINING_TEXTS = {
    model: {arm: source for arm, source in config["text_sources"].items() if arm in training["arms"]}
    for model, training in TRAININGS.items()
}


rule train_reference_model:
    input:
        lambda wildcards: [wheel(source["wheel"]) for source in TRAINING_TEXTS[wildcards.model].values()],
    output:
        expand("<results>/reference_models/{{model}}/{file}", file=REFERENCE_FILES),
    log:
        "<logs>/train_reference_model/{model}.log",
    benchmark:
        "<benchmarks>/train_reference_model/{model}.tsv"
    wildcard_constraints:
        model="|".join(map(re.escape, TRAININGS)),
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(3000),
    params:
        settings=lambda wildcards: TRAININGS[wildcards.model],
        text_sources=lambda wildcards: TRAINING_TEXTS[wildcards.model],
        wheels="resources/wheels",
        hashes=lambda wildcards: hashes([source["wheel"] for source in TRAINING_TEXTS[wildcards.model].values()]),
        committed=lambda wildcards: f"config/reference_models/{wildcards.model}",
        code=code("train_reference_model.py"),
        locked=locked("train_reference_model.py"),
    message:
        "train {wildcards.model} from its seeds; lines on its progress follow"
    script:
        "../scripts/train_reference_model.py"


rule reference_models_all:
    input:
        expand(
            "<results>/reference_models/{model}/{file}",
            model=TRAININGS,
            file=REFERENCE_FILES,
        ),
    message:
        "every reference model is trained again"
