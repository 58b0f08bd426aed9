"""Parts of models of images. They know no mesh.

`convolution_forms` computes a convolution in the form that is quickest where it runs.
"""
