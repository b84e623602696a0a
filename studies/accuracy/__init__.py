"""One model as accurate as an ensemble?"""
