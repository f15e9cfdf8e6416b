"""Programs of codeio whose outputs do not follow from their inputs, so that an entry has no answer to find.

Each of the 3,002 programs that come with reasoning-gym 0.1.25 was run on three seeds of its input in six processes,
alike but for the time, the folder and, in two of them, what lay in memory; those that mention dates also with the clock
set a year on. These gave something else. Named by ``draw.digest`` of the program, with what the output depends on.
"""

LEFT_OUT = {
    "0c6b404588bb": "clock",
    "258a6645c6a3": "clock",
    "9b972fdcedfe": "clock",
    "3c737e09d66f": "clock",
    "c1f8b2cd8032": "clock",
    "cd7357027c91": "clock",
    "545524a68433": "clock",
    "f30ab63f9057": "clock",
    "8728284f6c89": "fresh random numbers",
    "da5ce66a4cde": "fresh random numbers",
    "e3dc9c6644c8": "fresh random numbers",
    "0c3c5716af7c": "fresh random numbers",
    "6c84e086a5e5": "fresh random numbers",
    "f5f333b0bc47": "fresh random numbers",
    "83286825d308": "fresh random numbers",
    "bc834cdf9ea9": "objects in memory",
    "4064d13adf3f": "objects in memory",
    "2f54f73bbba3": "objects in memory",
    "5eb947dd4ec1": "objects in memory",
    "107999a6e4a4": "objects in memory",
    "a73ce5e6fd61": "objects in memory",
    "35c21c7b4573": "file's path",
    "74b389020127": "file's path",
    "fe78edcb20c4": "file's path",
}
