"""The optimizers of other trainers: which one it is here, and whether it is the same or only the nearest."""

from typing import get_args

from library.config.sections.learning import OptimizerName

# The trainer's name in small letters without signs -> ours; of several the first that is a name here, or a class.
SAME: dict[str, tuple[str, ...]] = {
    "adamw": ("AdamW",),
    "adamw8bit": ("AdamW8bit",),
    "adamw8": ("AdamW8bit",),
    "adam": ("torch.optim.Adam",),
    "adam8bit": ("bitsandbytes.optim.Adam8bit",),
    "adam8": ("bitsandbytes.optim.Adam8bit",),
    "ademamix": ("bitsandbytes.optim.AdEMAMix",),
    "ademamix8bit": ("bitsandbytes.optim.AdEMAMix8bit",),
    "adammini": ("AdamMini", "pytorch_optimizer.AdamMini"),
    "adagrad": ("torch.optim.Adagrad",),
    "adagrad8bit": ("bitsandbytes.optim.Adagrad8bit",),
    "adafactor": ("Adafactor",),
    "adabelief": ("pytorch_optimizer.AdaBelief",),
    "adopt": ("pytorch_optimizer.ADOPT",),
    "aida": ("pytorch_optimizer.Aida",),
    "came": ("CAME", "pytorch_optimizer.CAME"),
    "dadaptadagrad": ("DAdaptAdaGrad",),
    "dadaptadam": ("DAdaptAdam",),
    "dadaptadan": ("DAdaptAdan",),
    "dadaptlion": ("DAdaptLion",),
    "dadaptsgd": ("DAdaptSGD",),
    "dadaptation": ("DAdaptAdam",),
    "dadaptationadam": ("DAdaptAdam",),
    "dadaptationlion": ("DAdaptLion",),
    "lamb": ("bitsandbytes.optim.LAMB",),
    "lamb8bit": ("bitsandbytes.optim.LAMB8bit",),
    "lars": ("bitsandbytes.optim.LARS",),
    "lars8bit": ("bitsandbytes.optim.LARS8bit",),
    "lion": ("Lion",),
    "lion8bit": ("Lion8bit",),
    "muon": ("Muon", "pytorch_optimizer.Muon"),
    "prodigy": ("Prodigy",),
    "prodigyplusschedulefree": ("ProdigyPlusScheduleFree", "prodigyplus.ProdigyPlusScheduleFree"),
    "rmsprop": ("torch.optim.RMSprop",),
    "rmsprop8bit": ("bitsandbytes.optim.RMSprop8bit",),
    "schedulefreeadamw": ("AdamWScheduleFree",),
    "schedulefreesgd": ("SGDScheduleFree",),
    "sgd": ("torch.optim.SGD",),
    "sgd8bit": ("bitsandbytes.optim.SGD8bit",),
    "tiger": ("pytorch_optimizer.Tiger",),
    "yogi": ("pytorch_optimizer.Yogi",),
}
# Those that exist in one program only -> the one whose steps are nearest.
NEAREST = {
    "adamwadv": "adamw",
    "adoptadv": "adopt",
    "prodigyadv": "prodigy",
    "prodigy8bit": "prodigy",
    "lionadv": "lion",
    "signsgdadv": "lion",
    "muonadv": "muon",
    "adamuonadv": "muon",
    "came8bit": "came",
    "automagic": "adamw8bit",
    "automagic2": "adamw8bit",
    "automagic3": "adamw8bit",
    "automagicexperiment": "adamw8bit",
}


def plain(name: object) -> str:
    """The name in small letters, without signs: ADAMW_8BIT and adamw8bit are the same."""
    return "".join(letter for letter in str(name).casefold() if letter.isalnum())


def ours(name: object) -> tuple[str, str]:
    """The optimizer here, and a sentence where it is not the same: ("AdamW8bit", "")."""
    word = plain(name)
    near = NEAREST.get(word, word)
    known = SAME.get(near)
    if known is None:
        return str(name), ""
    here = next(choice for choice in known if choice in get_args(OptimizerName) or choice == known[-1])
    return here, f"{name} is not offered here; {here} is the nearest" if word in NEAREST else ""
