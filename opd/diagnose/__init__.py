"""`opd diagnose`: is on-policy distillation worth its compute for this student, these teachers and these prompts?"""
