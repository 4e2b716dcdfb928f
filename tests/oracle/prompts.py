"""Twenty varied prompts: prose, code, languages, emoji, structure, repetition."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of the forest, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0;",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "Die Donau ist der zweitlängste Fluss Europas und",
    "Il était une fois une petite fille qui",
    "La fotosíntesis es el proceso por el cual",
    "日本の首都は東京です。京都は",
    "Москва является столицей",
    "مرحبا، كيف حالك؟",
    "🎉🎂 Happy birthday! 🥳",
    "👩‍👩‍👧‍👦 family emoji and 🇫🇷 flags:",
    "one two three one two three one two three one two",
    "12 + 35 = 47\n18 + 24 = 42\n29 + 44 =",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "# Shopping list\n\n- apples\n- bread\n-",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "    \n\n\tindented   and   spaced\ttext\n",
]
