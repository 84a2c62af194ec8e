# All that comes from outside: where this is there, no other job needs a network.
rule ready_all:
    input:
        rules.models_all.input,
        rules.contexts_all.input,
        expand("<results>/exact/contexts/{model}/{arm}.json", model=EXACT_MODELS, arm=ARMS),
        expand("<results>/loss/contexts/{model}/{arm}.json", model=LOST, arm=ARMS),
        expand("<results>/structured/contexts/{model}/{arm}.json", model=MODELS, arm=STRUCTURED),
        [f"<results>/benchmark/tasks/{model}/{task}.json" for model, task in ASKED],
        [f"<results>/benchmark/tasks/{model}/{PROBED[model, length]}.json" for model, length in PROBED],
    message:
        "models, contexts and tasks are there; what follows needs no network"
