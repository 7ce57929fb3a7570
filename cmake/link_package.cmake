# cmake -DFROM=<package source> -DTO=<package in the build tree> -P link_package.cmake
# Links every Python file of FROM into TO and removes links whose file is gone.
file(GLOB_RECURSE links RELATIVE "${TO}" "${TO}/*.py" "${TO}/*.pyi" "${TO}/py.typed")
foreach(link IN LISTS links)
  if(NOT EXISTS "${FROM}/${link}")
    file(REMOVE "${TO}/${link}")
  endif()
endforeach()

file(GLOB_RECURSE files RELATIVE "${FROM}" "${FROM}/*.py" "${FROM}/*.pyi" "${FROM}/py.typed")
foreach(file IN LISTS files)
  get_filename_component(directory "${TO}/${file}" DIRECTORY)
  file(MAKE_DIRECTORY "${directory}")
  file(CREATE_LINK "${FROM}/${file}" "${TO}/${file}" SYMBOLIC)
endforeach()
